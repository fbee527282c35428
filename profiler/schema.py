"""`HardwareProfile`: what the probes measured on one machine for one model shape.

Probes (the names are a contract between profiler and cost model). `p50_us` is time on the host thread that decodes;
`gpu_us` is the time the work keeps the GPU busy (0 on a synchronous device, where the host does the work itself).

    copy            bytes, pinned             one copy host to device, issue to arrival
    embed                                     token embedding and the start of a step
    attention       context                   attention block of one layer, one token
    route                                     MoE norm, gate, top-k, ids and weights on the host
    predict         depth                     the gate's predictions for `depth` later layers, ids on the host
    speculated                                in place of route at a speculated layer: norm, choice by predicted scores
    plan            copies                    brain.begin without copies (0), or queueing some to an idle link (1)
    after_wait      wait_us                   attention, route, plan and finish together after waiting so long
    after_cpu       threads                   the same four after a layer-step that waited for CPU experts
    interrupt                                 decoding thread's loss per copy that lands while it works
    finish                                    weighted sum, residual, brain.finish
    experts_gpu     experts                   that many experts, one token each, resident
    experts_cpu     experts, threads          that many experts on the CPU, hand-off and result included
    both            gpu, cpu, threads         resident experts beside CPU experts, until both are done
    copy_beside_cpu      threads              one expert copy while CPU experts run
    experts_cpu_beside_copy  experts, threads CPU experts while copies run
    wait                                      one fetch beyond plan and copy: waking the copy thread, and back
    head                                      final norm, output projection, greedy choice
    cpu_format      experts, threads, format  that many experts on the CPU, one token each, beside nothing
    gpu_format      experts, format           that many experts on the device, one token each, beside nothing
    to_host         bytes, pinned             one copy from a GPU's memory
    both_ways       bytes                     one copy each way at once, between a GPU and pinned memory
    storage         bytes                     reading so much of the model's file, none of it in memory; not there where
                                              the system does not let go of it (a tmpfs; weights the engine has mapped)
    prefill_layer   tokens                    attention, route and sum of one layer on a prompt chunk
    prefill_expert  tokens                    one resident expert on that many tokens
    cpu_expert      tokens                    one expert on one CPU thread on that many tokens, hand-off included
    window_embed      tokens                  the block of that name in a step over that many tokens (1 to compare with)
    window_attention  tokens                  the same, at one context
    window_route      tokens                  the same
    window_predict    tokens                  the same, one layer ahead
    window_plan       tokens                  the same
    window_finish     tokens                  the same
    window_head       tokens                  the same
    window_experts_gpu  experts, tokens       resident experts of such a step, with so many tokens together
    window_experts_cpu  experts, tokens, threads  the same on the CPU, hand-off and result included
    draft_ngram     tokens                    proposing that many tokens by prompt look-up
    draft_model     tokens                    the same by the draft model of `meta.draft_model`, if there was one
    sample          tokens                    choosing at a temperature after looking at that many places of a window

On the graph path (`meta.path` is "graphs") blocks are graphs and the host's work between them. There are no route, both
and interrupt, no after_wait at other waits than measured, and these are other or more; the others are as above.

    attention       context                   entering a layer: sum of the one before, attention, routing, telling it;
                                              host: launching one graph
    launch                                    from launching a graph to being told by it, beyond the device's time
    embed                                     from the beginning of a step to its first launch
    predict         depth                     planning predictions; making them, behind the routing that is told
    speculated      context                   entering a layer that executes predictions and predicts the next one's
    enter_cpu                                 what entering takes longer where the CPU may compute experts
    replayed                                  what it takes longer where routing comes from a recording
    experts_gpu     experts                   resident experts, from their plan on
    prefill_expert  tokens                    device: its share of a launch of several; host: that launch
    plan            copies                    from being told until the device may run residents, without copies (0)
    issue                                     issuing one copy on the decoding thread
    late                                      launching one expert behind its copy
    bring                                     telling the device of such experts, of all that are issued at once
    finish                                    brain.finish, and issuing what it queued
    head                                      host: after the last layer's experts; device: output, choice, until known
    whole           context                   a step of one launch, all experts resident, until its token is known
    copy            bytes, pinned             of experts: one behind another; else as above
    copy_start                                what a copy with none before it takes longer
    wait                                      from a landing to the start of what waits for it: what a layer-step with
                                              misses takes beyond everything else
    gpu_beside_copy copies                    entering and k resident experts, without copies (0), beside some (1)
    gpu_behind_cpu  copies, threads           from the end of CPU experts until the next layer has told its routing,
                                              likewise
    submit                                    handing experts to the CPU
    cpu_asleep      threads, idle_us          what CPU experts take longer after so long a rest
    read_ahead      threads, idle_us          what they take less if one of them was read in so long a rest
    window_whole    tokens                    a step of one launch over so many tokens with the same experts
    window_whole_expert  tokens               what such a step takes longer for each other expert in a layer

With a calibration also `predict_NAME` at `depth`, for every other predictor NAME and rolled form NAME_rolled.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from foreload.errors import FileError, MismatchError
from foreload.files import parse_model, read_mapping, write_text
from foreload.formats import FORMATS, PackedFormat
from foreload.machine import machine_name, software
from foreload.shape import ModelShape

PROFILE_SCHEMA = 1
PROBED_CONTEXT = 64
"""Where blocks are measured whose time does not go by the context, or not more than that of `attention`."""
Microseconds = Annotated[float, Field(ge=0)]


def coordinate(axis: str, value: int) -> str:
    """A measurement's coordinate as it is shown: an expert format by its name, else the number."""
    return FORMATS[value] if axis == "format" and value in range(len(FORMATS)) else str(value)


class Measurement(BaseModel):
    """One probe at one point, with its spread and where it comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    probe: str
    at: dict[str, int] = {}
    p50_us: Microseconds
    p95_us: Microseconds
    gpu_us: Microseconds = 0.0
    gpu_p95_us: Microseconds = 0.0  # on the graph path
    mean_us: Microseconds | None = None  # of blocks that every step has, some now and then much longer than most are
    gpu_mean_us: Microseconds | None = None
    parts_us: tuple[Microseconds, ...] | None = None  # means of the shortest samples, and so on, of equally many each
    repeats: Annotated[int, Field(ge=1)]
    source: Literal["measured", "assumed"] = "measured"

    @model_serializer(mode="wrap")
    def _known(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without means and parts that are not known, as files from before there were any: they keep their hash."""
        return {name: value for name, value in handler(self).items() if value is not None}

    @property
    def cost_us(self) -> tuple[float, float]:
        """What it costs the host and the device: the means where they are known, else the medians."""
        host = self.p50_us if self.mean_us is None else self.mean_us
        return host, self.gpu_us if self.gpu_mean_us is None else self.gpu_mean_us


class ProfileMeta(BaseModel):
    """Which machine, which model shape, when, with what."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: int = PROFILE_SCHEMA
    device: Literal["cpu", "cuda"]
    device_name: str
    machine: str
    cores: Annotated[int, Field(ge=1)]
    dtype: Literal["float32", "bfloat16"]
    shape: dict[str, Any]
    shape_hash: str
    expert_bytes: Annotated[int, Field(ge=1)]
    expert_format: PackedFormat | None = None  # None: as the checkpoint has them
    gpu_uuid: str = ""  # and its driver; empty where they are not told
    driver: str = ""
    cpu_experts: str = ""  # what runs them: the native library and its instruction set, or torch
    path: Literal["eager", "graphs"] = "eager"  # how the engine launched decode steps
    mode: Literal["quick", "full"]
    emulated_link_bytes_per_s: Annotated[int, Field(ge=1)] | None = None
    pinned_bytes: Annotated[int, Field(ge=0)] | None = None  # host memory that may be pinned, if that is to count
    draft_model: str | None = None  # as settings name it
    date: str
    software: dict[str, str]
    left_out: tuple[str, ...] = ()  # groups of probes for which there was no time
    noise_pct: Annotated[float, Field(ge=0)]  # spread of one fixed probe repeated over the run

    @field_validator("shape")
    @classmethod
    def _plain_shape(cls, value: dict[str, Any]) -> dict[str, Any]:
        """As JSON would give it back, so that a profile read equals the profile written."""
        plain: dict[str, Any] = json.loads(json.dumps(value))
        return plain


class HardwareProfile(BaseModel):
    """All measurements of one run of the profiler."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    meta: ProfileMeta
    measurements: tuple[Measurement, ...]

    @model_validator(mode="after")
    def _version(self) -> HardwareProfile:
        if self.meta.schema_version != PROFILE_SCHEMA:
            raise ValueError(f"schema_version is {self.meta.schema_version}: this Foreload reads {PROFILE_SCHEMA}")
        return self

    @classmethod
    def load(cls, path: Path) -> HardwareProfile:
        """The profile in a JSON file; FileError if missing, corrupt, or of another schema."""
        return parse_model(cls, read_mapping(path, "profile"), str(path))

    def save(self, path: Path) -> None:
        """Write as JSON, atomically."""
        write_text(path, self.model_dump_json(indent=1) + "\n")

    @property
    def digest(self) -> str:
        """A hash of everything in it, to say which profile a prediction is of."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]

    def points(self, probe: str, **fixed: int) -> list[Measurement]:
        """Measurements of `probe` whose coordinates include `fixed`; FileError if there is none."""
        found = [m for m in self.measurements if m.probe == probe and fixed.items() <= m.at.items()]
        if not found:
            known = ", ".join(sorted({m.probe for m in self.measurements})) or "none"
            raise FileError(f"profile: no measurement of {probe!r} at {fixed or 'any point'}: it holds {known}")
        return found

    def check_here(self, device: str | None = None, device_name: str | None = None) -> None:
        """Raise MismatchError, naming both values, if it was measured on another machine or by another version.

        Or for another kind of device than `device`, or on another GPU than the one named, where either is given.
        """
        here = machine_name()
        if self.meta.machine != here:
            raise MismatchError(f"profile: measured on {self.meta.machine!r}, this machine is {here!r}")
        if device is not None and self.meta.device != device:
            raise MismatchError(f"profile: measured on device {self.meta.device!r}, this run uses {device!r}")
        if device_name is not None and self.meta.device_name != device_name:
            raise MismatchError(f"profile: measured on GPU {self.meta.device_name!r}, this one is {device_name!r}")
        self.check_version()

    def check_version(self) -> None:
        """Raise MismatchError, naming both values, if it was measured by another version."""
        version = software().get("foreload", "")
        measured = self.meta.software.get("foreload", version)
        if measured != version:
            raise MismatchError(f"profile: measured by Foreload {measured}, this is {version}: profile again")

    def check_model(self, shape: ModelShape, dtype: str) -> None:
        """Raise MismatchError, naming both values, if the profile was measured for another model shape or dtype."""
        if self.meta.shape_hash != shape.hash:
            raise MismatchError(f"profile: measured for model shape {self.meta.shape_hash}, this model is {shape.hash}")
        if self.meta.dtype != dtype:
            raise MismatchError(f"profile: measured in {self.meta.dtype}, this run uses {dtype}")
