"""Predictors of one engine: its calibration is found and checked before weights are loaded, and on the device only
while a predictor uses it."""

from __future__ import annotations

from pathlib import Path

from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.models.decoder import Decoder
from foreload.backend.predict import PREDICTORS, Predictor, make_predictor, needs_calibration, refusal
from foreload.backend.predict.calibration import META, Calibration, check_model, read_meta
from foreload.settings import Settings


class Workshop:
    """Where the calibration is. `folder` None: the model folder's own `calibration`, if it has one."""

    def __init__(self, checkpoint: Checkpoint, folder: Path | None) -> None:
        """FileError or MismatchError if a calibration is named that is damaged or of another model."""
        self._checkpoint = checkpoint
        self._folder = folder if folder is not None else self._own(checkpoint.folder)
        self._checked = False
        if folder is not None:
            self._check_folder()

    @staticmethod
    def _own(model: Path | None) -> Path | None:
        """The calibration in a model's folder, if there are both."""
        own = None if model is None else model / "calibration"
        return own if own is not None and (own / META).exists() else None

    def check(self, settings: Settings) -> None:
        """SettingsError if the predictor of `settings` needs a calibration and there is none; MismatchError if it is
        of another model."""
        if settings.uses_calibration:
            if self._folder is None:
                raise refusal(settings.predictor, settings.prefetch_rolled)
            self._check_folder()

    def _check_folder(self) -> None:
        if self._folder is None or self._checked:
            return
        shape, meta = self._checkpoint.shape, read_meta(self._folder)
        sizes = (shape.n_moe_layers, shape.experts, shape.hidden)
        check_model(meta, self._folder, self._checkpoint.name, sizes, lambda: self._checkpoint.weights_hash)
        self._checked = True

    def open(self, decoder: Decoder) -> Predictors:
        """The predictors on a loaded model."""
        return Predictors(self, decoder)

    @property
    def available(self) -> bool:
        """Whether there is a calibration."""
        return self._folder is not None

    def load(self) -> Calibration | None:
        """The calibration, checked, on the host; None without one."""
        if self._folder is None:
            return None
        self._check_folder()
        return Calibration.load(self._folder)


class Predictors:
    """Makes predictors on one decoder; `use` keeps the calibration on the device only as long as it is needed."""

    def __init__(self, workshop: Workshop, decoder: Decoder) -> None:
        self.check = workshop.check
        self.available = workshop.available
        self._workshop, self._decoder = workshop, decoder
        self._calibration: Calibration | None = None

    def use(self, settings: Settings) -> Predictor | None:
        """The predictor `settings` ask for; None if they predict nothing from gates."""
        if not settings.uses_calibration:
            self._calibration = None
        if settings.predictor not in PREDICTORS:
            return None
        return self.make(settings.predictor, settings.prefetch_rolled)

    def make(self, name: str, rolled: bool = False) -> Predictor:
        """The predictor of that name; SettingsError if it needs a calibration and there is none."""
        if needs_calibration(name, rolled) and self._calibration is None:
            loaded = self._workshop.load()
            if loaded is not None:
                self._calibration = loaded.to(self._decoder.device, self._decoder.embedding.dtype)
        return make_predictor(name, rolled, self._decoder, self._calibration)
