"""Train, calibrate, record and measure `topo` in one run, within a deadline.

    python -m recipes.topo.run --data .build/corpus --tokenizer foreload/assets/mini --out OUT --deadline-minutes 14

OUT/weights/ is a Hugging Face folder, OUT/samples/ the recordings with their cards, OUT/topo.json every figure,
OUT/profile.txt where a training step's time goes. `--bundle DIR` gets topo.json, profile.txt and the recordings in
archives under 16 MiB, renewed after every stage. A stage that fails is reported in topo.json under `errors`, and the
rest goes on; the exit status is then 1. `--tiny` is the whole path with a tiny model, in under a minute on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from recipes.train.config import Config
from recipes.train.data import Windows, load_ids
from recipes.train.export import export, load_folder
from recipes.train.model import Model
from recipes.train.train import Trainer

from . import bundle, evaluate
from .calibrate import calibrate, finished
from .live import Live
from .predictors import Predictor
from .profile import profile_training
from .provenance import card, machine, sha256, software, trace_meta
from .record import Plan, Recorder
from .text import Texts
from .verify import ModelDraft, NgramDraft

CONFIGS = Path(__file__).parent.parent / "train/configs"


@dataclass(frozen=True)
class Scale:
    """How much is done of everything."""

    config: str
    plan: Plan
    train_seconds: float
    reserve_seconds: float  # kept for everything after training
    batch: tuple[int, int]  # rows and length of calibration batches
    dv_tokens: int
    estimator_seconds: float
    estimator_sample: int
    measure: evaluate.Sizes


FULL = Scale("topo", Plan(), 390.0, 240.0, (8, 512), 2_000_000, 80.0, 4096, evaluate.Sizes())
TINY = Scale("tiny_topo", Plan.tiny(), 6.0, 20.0, (4, 128), 4096, 2.0, 256, evaluate.Sizes.tiny())


class Run:
    """One run: its clock, its results and the stages."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.began = time.perf_counter()
        self.args = args
        self.scale: Scale = TINY if args.tiny else FULL
        self.out: Path = args.out
        self.bundle: Path = args.bundle or args.out / "bundle"
        for folder in (self.out, self.bundle):
            folder.mkdir(parents=True, exist_ok=True)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.kind = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.config = Config.load(CONFIGS / f"{self.scale.config}.json")
        self.result: dict[str, Any] = {
            "tiny": bool(args.tiny),
            "machine": machine(),
            "software": software(),
            "shape": asdict(self.config.model),
            "quality_prompt": self.scale.measure.prompt,
            "stages_s": {},
            "errors": {},
        }

    def left(self) -> float:
        """Seconds until the deadline."""
        return float(self.args.deadline_minutes) * 60 - (time.perf_counter() - self.began)

    def keep(self) -> None:
        """Write results and renew the bundle."""
        bundle.write_json(self.out / "topo.json", self.result)
        bundle.copy_into(self.bundle, [self.out / "topo.json", self.out / "profile.txt"])
        if (self.out / "samples").exists():
            bundle.archive(self.out / "samples", self.bundle)

    @contextlib.contextmanager
    def stage(self, name: str, needed: bool = False) -> Iterator[None]:
        """Time a stage; an error is reported, and raised only if the stage is `needed`."""
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.result["errors"][name] = f"{type(error).__name__}: {error}"[:500]
            if needed:
                self.keep()
                raise
        self.result["stages_s"][name] = round(time.perf_counter() - began, 1)
        self.keep()
        print(f"== {name}: {self.result['stages_s'][name]} s, {self.left():.0f} s left", flush=True)

    def budget(self) -> float:
        """Seconds to train for."""
        limit = self.args.train_minutes * 60 if self.args.train_minutes else self.scale.train_seconds
        return max(5.0, min(limit, self.left() - self.scale.reserve_seconds))

    def train(self, ids: np.ndarray) -> Model:
        """Train for what the deadline leaves; export; return the model on the CPU."""
        windows = Windows(ids, self.device, self.config.train.seed)
        with self.stage("warm_up", needed=True):
            trainer = Trainer(self.config, windows, self.device)
            trainer.warm_up()
        with self.stage("profile"):
            self.result["profile"] = profile_training(trainer, self.out)
        with self.stage("train", needed=True):
            try:
                self.result["training"] = trainer.run(self.budget())
            except RuntimeError as error:  # the loss is not finite: once more, at half the rates
                self.result["training_retry"] = str(error)
                t = self.config.train
                slower = replace(t, matrix_rate=t.matrix_rate / 2, adam_rate=t.adam_rate / 2)
                trainer = Trainer(replace(self.config, train=slower), windows, self.device)
                self.result["training"] = trainer.run(self.budget())
        with self.stage("export", needed=True):
            state = {k: v.detach().float().cpu() for k, v in trainer.model.state_dict().items()}
            with torch.device("meta"):
                model = Model(self.config.model)
            model.load_state_dict(state, assign=True)
            export(self.config, model.requires_grad_(False), self.args.tokenizer, self.out / "weights")
            self.result["weights_sha256"] = sha256(self.out / "weights/model.safetensors")
        return model

    def loaded(self) -> Model:
        """Earlier weights of the same shape instead of training, and what the run that trained them said of it."""
        model = load_folder(self.config, self.args.weights)
        self.result["weights_sha256"] = sha256(self.args.weights / "model.safetensors")
        earlier = self.args.weights.parent / "topo.json"
        if earlier.exists():
            said = json.loads(earlier.read_text(encoding="utf-8"))
            if said.get("weights_sha256") == self.result["weights_sha256"]:
                self.result |= {key: said[key] for key in ("training", "profile") if key in said}
        export(self.config, model, self.args.tokenizer, self.out / "weights")
        return model

    def calibrated(self, live: Live, ids: np.ndarray) -> Predictor:
        """Default vectors and estimator, saved."""
        scale = self.scale
        with self.stage("calibrate", needed=True):
            windows = Windows(ids, self.device, seed=1000)
            found, self.result["calibration"] = calibrate(
                live, windows, self.result["weights_sha256"], shape=scale.batch, dv_tokens=scale.dv_tokens,
                seconds=scale.estimator_seconds, sample=scale.estimator_sample, seed=2,
            )  # fmt: skip
        return Predictor(live, found)

    def save_calibration(self, predictor: Predictor, hybrid: list[list[str | None]]) -> None:
        """As `foreload calibrate` would, in OUT/calibration."""
        finished(predictor.calibration, self.result["calibration"], hybrid).save(self.out / "calibration")

    def record(self, live: Live, predictor: Predictor, texts: Texts) -> Recorder:
        """All recordings."""
        meta = trace_meta(self.config.name, self.config.model, self.out / "weights/model.safetensors",
                          self.args.tokenizer / "tokenizer.json")  # fmt: skip
        plan = replace(self.scale.plan, verify_temperature=self.args.verify_temperature)
        recorder = Recorder(live, predictor, texts, plan, meta, self.out / "samples")
        with self.stage("record_subjects"):
            recorder.subjects()
        with self.stage("record_predictions"):
            recorder.predicted()
        draft = ModelDraft(load_folder(Config.load(CONFIGS / "draft.json"), self.args.draft), self.device)
        ngram = NgramDraft()
        for gamma in self.scale.plan.gammas:
            with self.stage(f"record_verify_{gamma}"):
                recorder.verified(gamma, draft, ngram)
        return recorder

    def cards(self, recorder: Recorder) -> None:
        """Cards beside the recordings, their sizes, and the beginning of each text."""
        samples = self.out / "samples"
        sizes = bundle.sizes(samples)
        tokenizer = Tokenizer.from_file(str(self.args.tokenizer / "tokenizer.json"))
        rows = []
        for r in recorder.recordings:
            text = card(r, recorder.meta, self.result["weights_sha256"], self.result.get("bits_per_byte", {}),
                        sizes[r.name])  # fmt: skip
            (samples / f"{r.name}.md").write_text(text, encoding="utf-8")
            rows.append({"name": r.name, "subjects": r.subjects, "seed": r.seed, "sampling": r.sampling,
                         "bytes": sizes[r.name], **r.facts})  # fmt: skip
        self.result["recordings"] = rows
        self.result["recordings_bytes"] = sum(sizes.values())
        self.result["excerpts"] = {name: tokenizer.decode(ids) for name, ids in recorder.excerpts.items()}
        if faults := bundle.size_faults(samples):
            raise ValueError("; ".join(faults))

    def all(self) -> int:
        """Everything; 0 if nothing failed."""
        with self.stage("load", needed=True):
            ids, texts = load_ids(self.args.data / "train.bin.xz"), Texts(self.args.data)
        model = self.loaded() if self.args.weights else self.train(ids)
        self.result["parameters"] = sum(p.numel() for p in model.parameters())
        self.result["active_parameters"] = self.config.model.active_parameters
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        torch.set_float32_matmul_precision("highest")
        live = Live(model, self.device, self.kind)
        predictor = self.calibrated(live, ids)
        with torch.no_grad():
            recorder = self.record(live, predictor, texts)
            with self.stage("cards_early"):
                self.cards(recorder)
            measured = evaluate.Evaluation(predictor, texts, self.scale.measure, self.result)
            for name, step in measured.steps(time.perf_counter() + max(10.0, self.left() - 20.0)):
                with self.stage(name):
                    step()
                    if name == "select":
                        self.save_calibration(predictor, measured.hybrid)
        with self.stage("cards"):
            self.cards(recorder)
        if self.left() > 45 or self.args.tiny:
            with self.stage("check_export"):
                self.result["logit_difference"] = evaluate.compare_export(model, self.out / "weights")
        print(json.dumps({k: self.result[k] for k in ("stages_s", "errors")}, indent=1), flush=True)
        return 1 if self.result["errors"] else 0


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(".build/corpus"))
    parser.add_argument("--tokenizer", type=Path, default=Path("foreload/assets/mini"))
    parser.add_argument("--draft", type=Path, default=Path("foreload/assets/draft"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, help="folder of the files to carry away (default OUT/bundle)")
    parser.add_argument("--weights", type=Path, help="an earlier OUT/weights: no training")
    parser.add_argument("--deadline-minutes", type=float, default=14.0)
    parser.add_argument("--train-minutes", type=float, default=0.0, help="at most so long (default 6.5)")
    parser.add_argument("--verify-temperature", type=float, default=0.0, help="0 (default): greedy verification")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Command line."""
    torch._dynamo.config.recompile_limit = 64
    sys.exit(Run(arguments()).all())


if __name__ == "__main__":
    main()
