"""How predictable the bundled model's routing is, and what executing predictions costs, beside Speculating Experts.

    python -m benchmarks.speculating --text HELDOUT.jsonl --out benchmarks/results/speculating-mini.json

The text must be none that the model or its calibration has seen. Prints tables; the JSON holds every figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.predict.calibration import Calibration
from foreload.backend.predict.recall import RecallSums, recall_report
from foreload.backend.predict.training import Watch
from foreload.backend.quality import Sizes, Trial, presets, quality
from foreload.backend.texts import Texts, read_texts, windows
from foreload.cli.output import table
from foreload.files import write_json
from foreload.machine import machine_name, software
from foreload.quality import ALL, QualityReport
from foreload.settings import MAX_PREFETCH_DEPTH, Settings

SIZES = Sizes(window=256, prompt_tokens=64, windows=24, greedy_prompts=4, greedy_tokens=64)
ALONE = Sizes(window=256, prompt_tokens=64, windows=4, greedy_tokens=0)
RECALL_WINDOWS = 16  # per subject

PAPER: dict[str, Any] = {
    "source": "arXiv 2603.19289, table 1 (accuracy), as transcribed in chenjiaj109550158/moe_subset, "
    "configs/benchmark/speculating_experts_accuracy_v8.yaml; Est-PF and Hybrid-PF are not in that transcription",
    "columns": ["exact", "router_pf"],
    "qwen3-30b-a3b": {
        "HumanEval": [0.939, 0.860], "MBPP+": [0.762, 0.659], "GSM8K": [0.950, 0.576], "AIME24": [0.800, 0.467],
        "AIME25": [0.733, 0.600], "StrategyQA": [0.719, 0.683],
    },
    "gpt-oss-20b": {
        "HumanEval": [0.970, 0.933], "MBPP+": [0.794, 0.804], "GSM8K": [0.942, 0.929], "AIME24": [0.667, 0.667],
        "AIME25": [0.667, 0.600], "StrategyQA": [0.753, 0.738],
    },
}  # fmt: skip


def recall(engine: Engine, calibration: Calibration, texts: Texts) -> dict[str, Any]:
    """Recall, weighted recall, recall at 2k and drift per predictor, form, depth and layer."""
    sums = RecallSums(engine.forward.decoder, calibration, MAX_PREFETCH_DEPTH)
    for rows in texts.by_subject().values():
        for ids in windows(rows, engine.tokenizer, SIZES.window, RECALL_WINDOWS):
            watch = Watch()
            engine.score(ids, watch, logits=False)
            with torch.inference_mode():
                sums.add(watch.seen)
    return {"tokens": sums.tokens, **recall_report(sums.table(), calibration.meta.hybrid)}


def alone(layers: int) -> list[Trial]:
    """Each layer speculated alone, by router and by estimator."""
    names = ("quasi_hidden", "estimator")
    return [Trial(f"{name} {layer}", name, (layer,)) for name in names for layer in range(1, layers)]


def recovered(report: QualityReport) -> float:
    """Share of Router-PF's loss of perplexity that Hybrid-PF does not have."""
    loss = {variant.name: report.loss_pct(variant) for variant in report.variants}
    return 1 - loss["hybrid_pf"] / loss["router_pf"]


def show(console: Console, found: dict[str, Any], report: QualityReport, single: QualityReport) -> None:
    """The tables."""
    names = ("gate", "quasi_hidden", "estimator", "hybrid")
    rows = []
    for name in names:
        for depth in range(1, MAX_PREFETCH_DEPTH + 1):
            plain, rolled = (found["recall"][name][form][f"depth_{depth}"]["mean"] for form in ("plain", "rolled"))
            used = (plain["recall"], plain["recall_2k"] / 2)
            rows.append(
                (name, str(depth), *(f"{plain[m]:.3f}" for m in ("recall", "weighted", "recall_2k")),
                 f"{used[0]:.2f} / {used[1]:.2f}", f"{plain['cosine']:.3f}", f"{rolled['recall']:.3f}")
            )  # fmt: skip
    columns = (
        "predictor",
        "depth",
        "recall@k",
        "of weight",
        "recall@2k",
        "used per copy",
        "cosine",
        "rolled@k",
    )
    note = f"measured on {found['recall']['tokens']} held-out tokens, mean over layers"
    console.print(table("Predicting the experts of later layers", columns, rows, note))
    layers = range(1, len(found["recall"]["gate"]["plain"]["depth_1"]["recall"]) + 1)
    by_layer = [
        (name, metric, *(f"{v:.3f}" for v in found["recall"][name]["plain"]["depth_1"][metric]))
        for name in names
        for metric in ("recall", "weighted", "recall_2k", "cosine")
    ]
    console.print(table("One layer ahead, by layer", ("predictor", "", *map(str, layers)), by_layer, note))
    costs = []
    for variant in report.variants:
        figures, greedy = variant.figures[ALL], variant.greedy
        costs.append(
            (variant.name, f"{figures.perplexity:.3f}", f"{report.loss_pct(variant):+.2f} %", f"{figures.kl:.4f}",
             f"{figures.top1_agreement:.1%}", "-" if greedy is None else f"{greedy.agreement:.1%}",
             "-" if greedy is None else f"{greedy.first_divergence:.1f}")
        )  # fmt: skip
    head = ("", "perplexity", "loss", "KL, nats", "same first choice", "same greedy tokens", "first other")
    share = f"hybrid_pf recovers {found['recovered']:.0%} of router_pf's loss"
    console.print(table("Executing predictions on all layers but the first", head, costs, f"measured; {share}"))
    per_layer = {
        name: [f"{single.loss_pct(v):+.2f} %" for v in single.variants[1:] if v.predictor == name]
        for name in ("quasi_hidden", "estimator")
    }
    rows = [(name, *values) for name, values in per_layer.items()]
    rows.append(("hybrid chooses", *(str(name) for name in found["hybrid"][1:])))
    console.print(table("Loss of one layer alone", ("", *map(str, layers)), rows, "measured"))
    for model in ("qwen3-30b-a3b", "gpt-oss-20b"):
        rows = [(task, *(f"{v:.3f}" for v in values)) for task, values in PAPER[model].items()]
        console.print(table(f"Published accuracy, {model}", ("", *PAPER["columns"]), rows))
    console.print(f"Published: {PAPER['source']}")


def main(args: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(args)
    texts = read_texts(given.text)
    with Engine.load(given.model, EngineOptions(context_tokens=SIZES.window), Settings(cache_ratio=1.0)) as engine:
        calibration = engine.predictor("hybrid").calibrated
        found: dict[str, Any] = {
            "model": engine.checkpoint.name, "weights_hash": engine.checkpoint.weights_hash,
            "machine": machine_name(), "software": software(), "texts": texts.sources,
            "hybrid": calibration.meta.hybrid[0], "expert_bytes": engine.expert_bytes, "top_k": engine.shape.top_k,
            "paper": PAPER,
        }  # fmt: skip
        found["recall"] = recall(engine, calibration, texts)
        report = quality(engine, presets(engine.shape.n_moe_layers), texts, SIZES)
        single = quality(engine, alone(engine.shape.n_moe_layers), texts, ALONE)
    found |= {"quality": report.model_dump(mode="json"), "layers_alone": single.model_dump(mode="json")}
    found["recovered"] = recovered(report)
    write_json(given.out, found)
    show(Console(width=140), found, report, single)


if __name__ == "__main__":
    main()
