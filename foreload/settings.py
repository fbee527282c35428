"""`Settings`: everything that is tuned, exported and pushed into a running engine (design: section 3)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from foreload.errors import BudgetError, SettingsError
from foreload.files import explain, read_mapping, write_text
from foreload.formats import ExpertFormat
from foreload.shape import ModelShape
from foreload.units import format_bytes

MAX_PREFETCH_DEPTH = 4
MAX_GAMMA = 16
MAX_HALF_LIFE = 4096

Pool = Literal["layer", "shared"]
Eviction = Literal["lru", "lfu", "lfru", "aged", "static", "utility", "random"]
Admission = Literal["demand", "background", "none"]
Predictor = Literal["none", "gate", "quasi_hidden", "estimator", "hybrid", "previous_step", "utility"]
GATE_SIDE = ("gate", "quasi_hidden", "estimator", "hybrid")
"""Predictors that give scores, and so weights, of a later layer's experts."""
MissAction = Literal["fetch", "cpu", "split"]
SplitRule = Literal["makespan", "tau", "bandwidth", "per_expert"]
Objective = Literal["makespan", "balance"]
NEXT_STEP = ("previous_step", "utility")
"""Predictors of a layer's next step, where no gate runs ahead and `prefetch_depth` stays 0."""
DraftKind = Literal["none", "ngram", "model"]


class Draft(BaseModel):
    """What proposes tokens that the model then verifies in one step, `gamma` at most.

    `model` is a folder or a bundled name (for kind `model` by default "draft"). It is loaded with the engine and stays
    on the device whatever `kind` is in force, so that `kind` and `gamma` may change while the engine runs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: DraftKind = "none"
    gamma: Annotated[int, Field(ge=0, le=MAX_GAMMA)] = 0
    model: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.gamma > 0) != (self.kind != "none"):
            raise ValueError(
                f"gamma {self.gamma} does not go with kind {self.kind!r}: 0 goes with 'none', 1 or more with the others"
            )
        return self

    @property
    def model_name(self) -> str | None:
        """The draft model to have on the device, if any."""
        return self.model or ("draft" if self.kind == "model" else None)


class Utility(BaseModel):
    """How the utility s of an expert follows its demand (MoE-SpAc; `backend/policy/utility.py`), and what is hot."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    k: Annotated[int, Field(ge=1, le=64)] = 4  # s is an integer from 0 to k
    signal: Literal["delta", "level"] = "delta"
    rate: Annotated[float, Field(ge=0, le=1)] = 0.1  # how fast the boundaries follow (lambda)
    adapt: Literal["real", "floored", "off"] = "real"
    theta_up: Annotated[float, Field(ge=0)] | None = None  # where the boundaries start; None: max(1/2, gamma / 2)
    theta_down: Annotated[float, Field(ge=0)] | None = None
    tau: Literal["auto"] | int = "auto"  # s >= tau is hot; k + 1: nothing is
    reset_done: bool = False  # eviction takes s as 0 in layers that the running step has computed

    @field_validator("tau", mode="before")
    @classmethod
    def _known_tau(cls, value: Any) -> Any:
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"tau is {value!r}: 'auto' or a whole number from 1 to k + 1 is accepted")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tau != "auto" and self.tau > self.k + 1:
            raise ValueError(f"tau {self.tau} is above k + 1: with k {self.k}, 'auto' or 1 to {self.k + 1} is accepted")
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
    pool: Pool = "layer"
    eviction: Eviction = "lru"
    half_life: Annotated[int, Field(ge=1, le=MAX_HALF_LIFE)] = 64  # of a use, in layer-steps, where eviction is `aged`
    admission: Admission = "demand"
    admit_per_step: Annotated[int, Field(ge=1, le=64)] = 2
    predictor: Predictor = "none"
    prefetch_depth: Annotated[int, Field(ge=0, le=MAX_PREFETCH_DEPTH)] = 0
    prefetch_width: Annotated[int, Field(ge=1)] | None = None
    prefetch_rolled: bool = False
    speculate_layers: tuple[Annotated[int, Field(ge=0)], ...] | Literal["all"] = ()
    miss_action: MissAction = "fetch"
    split_rule: SplitRule = "makespan"
    objective: Objective = "makespan"
    utility: Utility = Utility()
    cpu_threads: Annotated[int, Field(ge=1, le=256)] = 1
    cpu_read_ahead: bool = False  # idle CPU workers, not the link, bring the last predicted expert nearer
    draft: Draft = Draft()
    expert_format: ExpertFormat | tuple[ExpertFormat, ...] | None = None
    prefill_chunk_tokens: Annotated[int, Field(ge=1)] = 4096  # each chunk copies nearly all experts that are not there
    headroom_bytes: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.slots_per_layer is not None and self.cache_ratio is not None:
            raise ValueError("slots_per_layer and cache_ratio exclude each other: give one of them")
        self._check_predictor()
        self._check_speculation()
        if self.cpu_read_ahead and (self.miss_action == "fetch" or not self.prefetch_depth):
            raise ValueError(
                "cpu_read_ahead goes with a prefetch_depth of 1 or more and miss_action 'cpu' or 'split': "
                f"they are {self.prefetch_depth} and {self.miss_action!r}"
            )
        if self.objective != "makespan" and self.split_rule not in ("makespan", "tau"):
            raise ValueError(
                f"objective {self.objective!r} goes with split_rule 'makespan' or 'tau': "
                f"{self.split_rule!r} weighs nothing"
            )
        return self

    def _check_predictor(self) -> None:
        if self.predictor in NEXT_STEP:
            if self.prefetch_depth:
                raise ValueError(
                    f"prefetch_depth {self.prefetch_depth} does not go with predictor {self.predictor!r}, "
                    "which looks at each layer's next step: depth 0"
                )
            if self.admission == "none":
                raise ValueError(f"predictor {self.predictor!r} needs an admission that lets residents change")
        elif (self.prefetch_depth > 0) != (self.predictor != "none"):
            raise ValueError(
                f"prefetch_depth {self.prefetch_depth} does not go with predictor {self.predictor!r}: "
                "depth 0 goes with 'none', a depth of 1 or more with a predictor"
            )
        if self.prefetch_rolled and (self.prefetch_depth < 2 or self.predictor not in GATE_SIDE):
            raise ValueError(
                f"prefetch_rolled goes with a prefetch_depth of 2 or more and predictor {', '.join(GATE_SIDE)}: "
                f"they are {self.prefetch_depth} and {self.predictor!r}"
            )

    @property
    def uses_utility(self) -> bool:
        """Whether anything is decided by utility."""
        split = self.miss_action == "split" and self.split_rule == "tau"
        return split or self.eviction == "utility" or self.predictor == "utility"

    @property
    def needs_costs(self) -> str | None:
        """What cannot be decided without measured costs, as words; None if all can."""
        if self.miss_action == "split":
            return "miss_action 'split'"
        return f"predictor {self.predictor!r}" if self.predictor in NEXT_STEP else None

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
            write_text(path, _toml(values))
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
        parts = []
        for key, value in flat_fields(self.model_dump(exclude_defaults=True)):
            shown = "/".join(map(str, value)) if isinstance(value, tuple) else str(value)
            parts.append(f"{key}={shown}")
        return " ".join(parts) or "default"


def _toml(values: Mapping[str, Any]) -> str:
    """`values` as TOML: plain fields, then one table per nested model."""
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in values.items() if key not in tables]
    for name, table in tables.items():
        lines += [f"\n[{name}]\n", *(f"{key} = {json.dumps(value)}\n" for key, value in table.items())]
    return "".join(lines)


def flat_fields(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields of nested models under their full names."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat_fields(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
    """Persistent slots per MoE layer; a shared pool has their sum, and no layer a claim on its part.

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
    each = min(shape.experts, spare // layers)
    left = spare % layers if settings.pool == "shared" and each < shape.experts else 0
    return (each + 1,) * left + (each,) * (layers - left)


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
