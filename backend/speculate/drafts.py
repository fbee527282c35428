"""`Drafts`: the drafters of one engine, and the one that the settings in force use."""

from __future__ import annotations

from foreload.backend.sampling import Sampler
from foreload.backend.speculate.base import NOTHING, Drafter, Proposal
from foreload.backend.speculate.model import ModelDrafter
from foreload.backend.speculate.ngram import NgramDrafter
from foreload.errors import ReloadError, SettingsError
from foreload.settings import Settings


class Drafts:
    """Follows the settings, also between two tokens of a running request; used by the decoding thread."""

    def __init__(self, model: ModelDrafter | None = None, name: str | None = None) -> None:
        """`model`, called `name` in the settings, is the draft model on the device, if there is one."""
        self.gamma = 0
        self.model, self.name = model, name
        self._drafters: dict[str, Drafter] = {"ngram": NgramDrafter()} | ({} if model is None else {"model": model})
        self._current: Drafter | None = None
        self._started = False

    @staticmethod
    def check(settings: Settings, context_tokens: int) -> None:
        """Raise SettingsError if a window of these settings does not fit into the context."""
        if settings.draft.gamma + 1 > context_tokens:
            raise SettingsError(
                f"draft.gamma {settings.draft.gamma} exceeds the context: a verify step of "
                f"{settings.draft.gamma + 1} tokens does not fit in context_tokens {context_tokens}"
            )

    def check_loaded(self, settings: Settings) -> None:
        """Raise ReloadError if the settings name another draft model than the one on the device."""
        wanted = settings.draft.model_name
        if wanted is not None and wanted != self.name:
            held = "none is loaded" if self.name is None else f"{self.name!r} is loaded"
            raise ReloadError(f"draft.model {wanted!r} needs a reload of the engine: {held}")

    @property
    def on(self) -> bool:
        """Whether steps are verify steps."""
        return self._current is not None

    def follow(self, settings: Settings) -> None:
        """Use what checked settings say."""
        wanted = self._drafters.get(settings.draft.kind)
        self._started = self._started and wanted is self._current
        self._current, self.gamma = wanted, settings.draft.gamma

    def start(self, prompt: list[int]) -> None:
        """A request begins."""
        self._started = self.on
        if self._current is not None:
            self._current.start(prompt)

    def propose(self, text: list[int], most: int, sampler: Sampler) -> Proposal:
        """Draft tokens after `text`, at most `most` and at most gamma."""
        gamma = min(self.gamma, most)
        if self._current is None or gamma < 1:
            return NOTHING
        if not self._started:
            self.start(text)
        return self._current.propose(text, gamma, sampler)
