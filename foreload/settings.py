"""`Settings`: everything that is tuned, exported and pushed into a running engine (design: section 3)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from foreload.errors import BudgetError, SettingsError
from foreload.files import explain, read_mapping, write_text
from foreload.shape import ModelShape
from foreload.units import format_bytes

MAX_PREFETCH_DEPTH = 4
MAX_GAMMA = 16

Eviction = Literal["lru", "lfu", "lfru"]
Admission = Literal["demand", "background", "none"]
Predictor = Literal["none", "gate", "quasi_hidden", "estimator", "hybrid"]
GATE_SIDE = ("gate", "quasi_hidden", "estimator", "hybrid")
"""Predictors that give scores, and so weights, of a later layer's experts."""
MissAction = Literal["fetch", "cpu", "split"]
SplitRule = Literal["makespan", "bandwidth"]
DraftKind = Literal["none", "ngram"]


class Draft(BaseModel):
    """What proposes tokens that the model then verifies in one step, `gamma` at most."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: DraftKind = "none"
    gamma: Annotated[int, Field(ge=0, le=MAX_GAMMA)] = 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.gamma > 0) != (self.kind != "none"):
            raise ValueError(
                f"gamma {self.gamma} does not go with kind {self.kind!r}: 0 goes with 'none', 1 or more with the others"
            )
        return self


class Settings(BaseModel):
    """One frozen, validated setting of the engine.

    `slots_per_layer` (one count per MoE layer) or `cache_ratio` (0 to 1, the same in every layer) says how many
    experts stay on the device between steps; with neither, the largest uniform count that fits is used.
    `speculate_layers` (MoE layers counted from 0, or "all" but the first) execute what was predicted for them one layer
    earlier, and their gate does not run: the only setting here that changes text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    slots_per_layer: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    cache_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    eviction: Eviction = "lru"
    admission: Admission = "demand"
    admit_per_step: Annotated[int, Field(ge=1, le=64)] = 2
    predictor: Predictor = "none"
    prefetch_depth: Annotated[int, Field(ge=0, le=MAX_PREFETCH_DEPTH)] = 0
    prefetch_width: Annotated[int, Field(ge=1)] | None = None
    prefetch_rolled: bool = False
    speculate_layers: tuple[Annotated[int, Field(ge=0)], ...] | Literal["all"] = ()
    miss_action: MissAction = "fetch"
    split_rule: SplitRule = "makespan"
    cpu_threads: Annotated[int, Field(ge=1, le=256)] = 1
    draft: Draft = Draft()
    prefill_chunk_tokens: Annotated[int, Field(ge=1)] = 256
    headroom_bytes: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.slots_per_layer is not None and self.cache_ratio is not None:
            raise ValueError("slots_per_layer and cache_ratio exclude each other: give one of them")
        if (self.prefetch_depth > 0) != (self.predictor != "none"):
            raise ValueError(
                f"prefetch_depth {self.prefetch_depth} does not go with predictor {self.predictor!r}: "
                "depth 0 goes with 'none', a depth of 1 or more with a predictor"
            )
        if self.prefetch_rolled and (self.prefetch_depth < 2 or self.predictor not in GATE_SIDE):
            raise ValueError(
                f"prefetch_rolled goes with a prefetch_depth of 2 or more and predictor {', '.join(GATE_SIDE)}: "
                f"they are {self.prefetch_depth} and {self.predictor!r}"
            )
        self._check_speculation()
        return self

    def _check_speculation(self) -> None:
        layers = self.speculate_layers
        if layers and self.predictor not in GATE_SIDE:
            raise ValueError(
                f"speculate_layers needs a predictor with weights, {', '.join(GATE_SIDE)}: it is {self.predictor!r}"
            )
        if layers != "all" and 0 in layers:
            raise ValueError("speculate_layers holds 0: nothing comes before the first MoE layer to predict it from")
        if layers != "all" and list(layers) != sorted(set(layers)):
            raise ValueError(f"speculate_layers is {list(layers)}: distinct MoE layers in ascending order are needed")

    @classmethod
    def parse(cls, value: Any, source: str = "settings") -> Settings:
        """`value` (a mapping) as Settings; SettingsError names `source`, the field and what would be accepted."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise SettingsError(f"{source}: {explain(error, cls)}") from error

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Settings from a JSON or TOML file; FileError or SettingsError otherwise."""
        return cls.parse(read_mapping(path, "settings"), str(path))

    def save(self, path: Path) -> None:
        """Write as JSON or, if `path` ends in .toml, as TOML, atomically."""
        values = self.model_dump(mode="json", exclude_none=True)
        if Path(path).suffix == ".toml":
            write_text(path, "".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))
        else:
            write_text(path, json.dumps(values, indent=1) + "\n")

    def changed(self, **fields: Any) -> Settings:
        """A copy with other values, validated again."""
        return Settings.parse({**self.model_dump(), **fields})

    @property
    def uses_calibration(self) -> bool:
        """Whether the predictor needs default vectors or the estimator."""
        return self.predictor in GATE_SIDE and (self.predictor != "gate" or self.prefetch_rolled)

    def prediction(self, depth: int) -> str:
        """The predictor's name in recordings at `depth`: the rolled form differs from the second layer ahead on."""
        return f"{self.predictor}_rolled" if self.prefetch_rolled and depth > 1 else self.predictor

    def speculated(self, shape: ModelShape) -> tuple[int, ...]:
        """The MoE layers (counted from 0) that execute predictions; SettingsError for one the model does not have."""
        if self.speculate_layers == "all":
            return tuple(range(1, shape.n_moe_layers))
        if self.speculate_layers and self.speculate_layers[-1] >= shape.n_moe_layers:
            raise SettingsError(
                f"speculate_layers holds {self.speculate_layers[-1]}: the model has MoE layers 0 to "
                f"{shape.n_moe_layers - 1}, and the first cannot be speculated"
            )
        return self.speculate_layers

    def width(self, shape: ModelShape) -> int:
        """Experts prefetched per predicted layer and token of a step."""
        return min(self.prefetch_width or shape.top_k, shape.experts)

    def describe(self) -> str:
        """The fields that differ from the default, on one line."""
        parts = [f"{key}={_shown(value)}" for key, value in self.model_dump(exclude_defaults=True).items()]
        return " ".join(parts) or "default"


def _toml(value: Any) -> str:
    """A value as TOML, mappings as inline tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(_shown(inner) for inner in value.values())
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def step_experts(settings: Settings, shape: ModelShape) -> int:
    """The most distinct experts that a layer-step can demand: a verify step has up to gamma + 1 tokens."""
    return min(shape.experts, (settings.draft.gamma + 1) * shape.top_k)


def staging_slots(settings: Settings, shape: ModelShape) -> int:
    """Slots that hold what is fetched or prefetched before it is kept or dropped; always there, whatever the cache.

    A step's demand, `prefetch_depth` layers of prefetches, and the background uploads of one layer-step.
    """
    prefetch = settings.prefetch_depth * min(shape.experts, (settings.draft.gamma + 1) * settings.width(shape))
    uploads = settings.admit_per_step if settings.admission == "background" else 0
    return step_experts(settings, shape) + prefetch + uploads


def slot_counts(settings: Settings, shape: ModelShape, slot_budget: int | None = None) -> tuple[int, ...]:
    """Persistent slots per MoE layer.

    `slot_budget` is how many slots (persistent and staging) the device can hold; it decides the default and refuses
    what does not fit. Raises SettingsError for a list of the wrong length or a count above the experts of a layer.
    """
    layers = shape.n_moe_layers
    if settings.slots_per_layer is not None:
        counts = settings.slots_per_layer
        if len(counts) != layers:
            raise SettingsError(f"slots_per_layer has {len(counts)} entries: the model has {layers} MoE layers")
        if max(counts) > shape.experts:
            raise SettingsError(f"slots_per_layer holds {max(counts)}: a layer has {shape.experts} experts")
        return counts
    if settings.cache_ratio is not None:
        return (int(settings.cache_ratio * shape.experts + 1e-9),) * layers
    if slot_budget is None:
        raise SettingsError("slots_per_layer and cache_ratio are both unset and no memory budget is known: give one")
    spare = max(0, slot_budget - staging_slots(settings, shape))
    return (min(shape.experts, spare // layers),) * layers


def check_slots(settings: Settings, shape: ModelShape, slot_budget: int, expert_bytes: int) -> tuple[int, ...]:
    """`slot_counts`, refused with BudgetError (naming the shortfall) if it exceeds `slot_budget` slots."""
    counts = slot_counts(settings, shape, slot_budget)
    staging = staging_slots(settings, shape)
    missing = sum(counts) + staging - slot_budget
    if missing > 0:
        shortfall = missing * expert_bytes
        raise BudgetError(
            f"device memory holds {slot_budget} expert slots, "
            f"these settings need {sum(counts)} and {staging} for staging: "
            f"{format_bytes(shortfall)} ({shortfall} bytes) short",
            "vram",
            shortfall,
        )
    return counts
