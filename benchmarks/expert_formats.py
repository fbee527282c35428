"""What small expert formats cost the bundled model: perplexity, KL and agreement beside its own floats.

    python -m benchmarks.expert_formats --text HELDOUT.jsonl [--model mini] [--windows 16] [--device cpu] [--out FILE]

The text must be none that the model was trained on. Every format scores the same windows, in float32 apart from the
experts; tokens after the first 64 of a window of 256 count.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.options import Device
from foreload.backend.quality import Loss
from foreload.backend.texts import read_texts, windows
from foreload.cli.output import table
from foreload.files import write_json
from foreload.formats import ExpertFormat
from foreload.machine import machine_name, software
from foreload.settings import Settings

CHOICES: tuple[ExpertFormat | None, ...] = (None, "bf16", "bf12", "fp8", "int8", "mxfp4")
WINDOW, PROMPT = 256, 64


def score(engine: Engine, ids: list[int]) -> Tensor:
    """Logits [window - prompt, vocab] that predict the tokens after the prompt."""
    found: list[Tensor] = []
    with torch.inference_mode(), engine.copies.lock:
        engine.brain.start_request()
        engine.copies.settle()
    with torch.inference_mode():
        engine.forward.prefill(ids, 0, True, lambda rows: found.append(rows.clone()))
    return torch.cat(found)[PROMPT - 1 :]


def measure(
    model: str, texts: list[Path], count: int, device: Device = "cpu", out: Path | None = None
) -> dict[str, Any]:
    """Figures of every format by subject, and bytes of an expert; with `out` also there, after each format."""
    exact: dict[tuple[str, int], Tensor] = {}
    rows: list[dict[str, Any]] = []
    found = {
        "source": "measured",
        "model": model,
        "device": torch.cuda.get_device_name() if device == "cuda" else machine_name(),
        "machine": machine_name(),
        "software": software(),
        "window": WINDOW,
        "prompt_tokens": PROMPT,
        "windows_per_subject": count,
        "texts": [path.name for path in texts],
        "rows": rows,
    }
    for chosen in CHOICES:
        options = EngineOptions(device, "float32", context_tokens=WINDOW, eager=device == "cuda")
        with Engine.load(model, options, Settings(cache_ratio=1.0, expert_format=chosen)) as engine:
            subjects = {
                subject: windows(of, engine.tokenizer, WINDOW, count)
                for subject, of in read_texts(texts).shuffled(0).by_subject().items()
            }
            total = Loss(engine.device)
            by_subject = {subject: Loss(engine.device) for subject in subjects}
            for subject, pieces in subjects.items():
                for at, ids in enumerate(pieces):
                    logits, targets = score(engine, ids), torch.tensor(ids[PROMPT:], device=engine.device)
                    reference = exact.setdefault((subject, at), logits)
                    for loss in (total, by_subject[subject]):
                        loss.add(logits, reference, targets)
            figures = {"all": total, **by_subject}
            rows.append(
                {
                    "format": engine.formats[0],
                    "expert_bytes": engine.expert_bytes,
                    "figures": {name: loss.figures().model_dump() for name, loss in figures.items()},
                }
            )
        if out is not None:
            write_json(out, found)
    return found


def main() -> None:
    """Parse flags, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expert_formats", description=__doc__)
    parser.add_argument("--text", type=Path, action="append", required=True, metavar="FILE")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--windows", type=int, default=16, help="per subject")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, metavar="FILE")
    given = parser.parse_args()
    values = measure(given.model, given.text, given.windows, given.device, given.out)
    exact = values["rows"][0]["figures"]["all"]["perplexity"]
    shown = []
    for row in values["rows"]:
        found = row["figures"]["all"]
        loss = 100 * (found["perplexity"] / exact - 1)
        shown.append(
            (row["format"], f"{row['expert_bytes']:,}", f"{found['perplexity']:.4f}", f"{loss:+.3f} %",
             f"{found['kl']:.5f}", f"{found['top1_agreement']:.2%}")
        )  # fmt: skip
    tokens = values["rows"][0]["figures"]["all"]["tokens"]
    note = f"source: measured, {given.model}, teacher-forced, {tokens} held-out tokens"
    columns = ("format", "bytes of an expert", "perplexity", "loss", "KL, nats", "same first choice")
    Console(width=100, highlight=False).print(table("Expert formats", columns, shown, note))


if __name__ == "__main__":
    main()
