"""`QualityReport`: what settings that change the text cost, as measured (`foreload quality`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from foreload.files import parse_model, read_mapping, write_text
from foreload.settings import Settings
from foreload.shape import ModelShape

ALL = "all"
"""The subject that stands for all texts together."""


class Figures(BaseModel):
    """One variant on the texts of one subject, teacher-forced: beside the exact model on the same tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tokens: Annotated[int, Field(ge=1)]
    nats_per_token: float
    perplexity: float
    kl: float  # KL(exact || variant), nats per token
    top1_agreement: float  # share of tokens whose likeliest successor is the exact model's


class Greedy(BaseModel):
    """Greedy continuations of prompts by the engine under the variant, beside the exact ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    prompts: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]  # of each continuation
    identical: float  # share of continuations
    agreement: float  # share of tokens that are the exact ones at their place
    first_divergence: float  # place of the first other token, mean over prompts; `tokens` where there is none


class Variant(BaseModel):
    """What executes predictions, and what that costs; `predictor` none is the exact model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    predictor: str
    layers: tuple[int, ...]  # MoE layers, from 0
    expert_format: str | tuple[str, ...] | None = None  # None: the experts as the exact model has them
    in_prompts: bool = False  # prompt tokens execute predictions too, which no setting does
    figures: dict[str, Figures]  # by subject, and `all`
    greedy: Greedy | None = None


class QualityReport(BaseModel):
    """The result of one `foreload quality`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    model: str
    weights_hash: str
    dtype: str
    texts: tuple[str, ...]
    window: int
    prompt_tokens: int
    machine: str
    software: dict[str, str]
    variants: tuple[Variant, ...]  # exact first

    @classmethod
    def load(cls, path: Path) -> QualityReport:
        """The report in a JSON file; FileError if missing, corrupt, or of another schema."""
        return parse_model(cls, read_mapping(path, "quality report"), str(path))

    def save(self, path: Path) -> None:
        """Write as JSON, atomically."""
        write_text(path, self.model_dump_json(indent=1) + "\n")

    def loss_pct(self, variant: Variant, subject: str = ALL) -> float:
        """How much larger the variant's perplexity is than the exact one, in per cent."""
        exact = self.variants[0].figures[subject].perplexity
        return 100 * (variant.figures[subject].perplexity / exact - 1)

    def measured_loss_pct(self, settings: Settings, shape: ModelShape) -> float | None:
        """The loss of settings: 0 where they change no text, None where theirs was not measured."""
        layers = settings.speculated(shape)
        if not layers and settings.expert_format is None:
            return 0.0
        wanted = (settings.predictor if layers else "none", layers, settings.expert_format, False)
        for variant in self.variants[1:]:
            if (variant.predictor, variant.layers, variant.expert_format, variant.in_prompts) == wanted:
                return self.loss_pct(variant)
        return None
