"""The whole loop on a GPU: bit-identity of every fetch-only setting, the demo, validation; raw results as JSON.

    python -m benchmarks.gpu_loop --out DIR

Writes exactness.json, demo/ (as `foreload demo`), validate.json and summary.json to DIR.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.policy import Counter
from foreload.backend.recorder import read_prompts
from foreload.files import write_json
from foreload.machine import machine_name, software
from foreload.settings import Settings

MODEL = "mini"
PROMPTS, PROMPT_TOKENS, TOKENS, SEEDS = 3, 96, 48, 2


def fetch_only() -> list[Settings]:
    """Settings that copy every expert the device lacks, and so must not change a single bit."""
    found = []
    for slots in ({"cache_ratio": 0.0}, {"slots_per_layer": (1,) * 8}, {"cache_ratio": 0.25}, {"cache_ratio": 1.0}):
        for depth in (0, 1, 2):
            prefetch = {"predictor": "gate", "prefetch_depth": depth} if depth else {}
            found.append({**slots, **prefetch})
    found += [
        {"cache_ratio": 0.25, "eviction": "lfu", "prefill_chunk_tokens": 17},
        {"cache_ratio": 0.25, "eviction": "lfru", "predictor": "gate", "prefetch_depth": 2, "prefetch_width": 8},
        {"cache_ratio": 0.25, "admission": "none"},
        {"slots_per_layer": (0, 1, 32, 3, 7, 8, 16, 2), "admission": "background", "prefill_chunk_tokens": 5},
    ]
    return [Settings.parse(fields) for fields in found]


def logits(engine: Engine, prompts: list[list[int]]) -> torch.Tensor:
    """Logits [prompts, TOKENS, vocab] of greedy decoding, on the host."""
    rows = []
    with torch.inference_mode():
        for ids in prompts:
            with engine.copies.lock:
                engine.brain.start_request()
                engine.copies.settle()
            chunk, row = engine.settings.prefill_chunk_tokens, torch.empty(0)
            for at in range(0, len(ids), chunk):
                row = engine.forward.prefill(ids[at : at + chunk], at, at + chunk >= len(ids))
            for step in range(TOKENS):
                rows.append(row.float().cpu())
                row = engine.forward.decode([int(row.argmax())], len(ids) + step)[0]
    return torch.stack(rows).view(len(prompts), TOKENS, -1)


def exactness(device: str) -> dict[str, Any]:
    """Every fetch-only setting against fully resident, with NaN poisoning and random copy delays on."""
    options = EngineOptions(device=device, context_tokens=512)  # type: ignore[arg-type]
    with Engine.load(MODEL, options, Settings(cache_ratio=1.0)) as engine:
        prompts = [engine.tokenizer.encode(p.text)[:PROMPT_TOKENS] for p in read_prompts()[::14][:PROMPTS]]
        references = {}
        for chunk in sorted({s.prefill_chunk_tokens for s in fetch_only()}):
            engine.apply(Settings(cache_ratio=1.0, prefill_chunk_tokens=chunk))
            references[chunk] = logits(engine, prompts)
    rows = []
    for seed in range(SEEDS):
        debug = EngineOptions(device=device, context_tokens=512, debug_seed=seed)  # type: ignore[arg-type]
        with Engine.load(MODEL, debug, Settings(cache_ratio=0.0)) as engine:
            for settings in fetch_only():
                engine.apply(settings)
                engine.reset_cache()
                before = engine.brain.counters.copy()
                found = logits(engine, prompts)
                counted = (engine.brain.counters - before).sum(axis=(0, 1))
                equal = bool(torch.equal(found, references[settings.prefill_chunk_tokens]))
                rows.append(
                    {
                        "settings": settings.describe(),
                        "seed": seed,
                        "bit_identical": equal,
                        "copies": int(counted[[Counter.FETCHED, Counter.PREFETCHED, Counter.UPLOADED]].sum()),
                    }
                )
    return {"logit_rows": PROMPTS * TOKENS, "rows": rows}


def command(*arguments: str) -> dict[str, Any]:
    """Run one `foreload` command with --json and return what it printed; raises if it failed."""
    code = "import sys; from foreload.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"foreload {' '.join(arguments)}: {done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Run all parts on the GPU (or, to try the script, on the CPU) and write their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = parser.parse_args()
    out, device = given.out, given.device
    name = torch.cuda.get_device_name() if device == "cuda" else machine_name()
    summary: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": name,
        "machine": machine_name(),
        "software": software(),
    }
    found = exactness(device)
    write_json(out / "exactness.json", {**summary, **found})
    summary["exactness"] = {
        "settings": len(found["rows"]),
        "bit_identical": sum(row["bit_identical"] for row in found["rows"]),
        "copies": sum(row["copies"] for row in found["rows"]),
    }
    print(json.dumps(summary["exactness"]), flush=True)
    for turn in range(2):
        summary[f"demo_{turn}"] = command("demo", "--device", device, "--out", str(out / "demo"))
        print(json.dumps(summary[f"demo_{turn}"]), flush=True)
    demo = out / "demo"
    files = ("--profile", str(demo / "profile.json"), "--trace", str(demo / "trace.parquet"))
    fewer = ("--requests", "2", "--repeats", "3", "--device", device)
    checked = command("validate", MODEL, *files, *fewer, "--out", str(out / "validate.json"))
    summary["validate"] = checked["summary"]
    write_json(out / "summary.json", summary)
    for row in checked["rows"]:
        print(row["settings"], *(f"{row[k]:.3f}" for k in ("predicted_tpot_ms", "measured_tpot_ms", "error_pct")))
    print(json.dumps(checked["summary"]))


if __name__ == "__main__":
    main()
