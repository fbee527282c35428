"""Predicting and executing predictions on `mini` and `topo`, beside the published accuracies, as one Markdown file.

    python -m benchmarks.speculating_tables [--mini benchmarks/results/speculating-mini.json]
        [--topo recipes/topo/results/topo.json] [--out benchmarks/results/speculating.md]

Reads what `benchmarks.speculating` and `recipes.topo.run` (also with --tiny) have written.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.speculating import PAPER
from foreload.files import read_mapping, write_text
from foreload.quality import ALL, QualityReport

RESULTS = Path(__file__).parent / "results"
TOPO = Path(__file__).parent.parent / "recipes" / "topo" / "results" / "topo.json"
PREDICTORS = ("gate", "quasi_hidden", "estimator", "hybrid")
VARIANTS = ("exact", "router_pf", "est_pf", "hybrid_pf", "router_pf_prefill")
ALONE = ("quasi_hidden", "estimator")


@dataclass(frozen=True)
class Found:
    """One model's figures, whoever wrote them.

    `recall`: predictor -> form -> depth -> figures; `quality`: variant -> figures over all texts; `alone`: predictor ->
    KL in nats when one layer alone executes predictions, from MoE layer 1 on, None where it was not measured.
    """

    model: str
    recall: Mapping[str, Any]
    hybrid: Sequence[str | None]
    quality: Mapping[str, Mapping[str, float]]
    greedy: Mapping[str, Mapping[str, float]]
    alone: Mapping[str, Sequence[float | None]]
    said: str

    @property
    def layers(self) -> range:
        """MoE layers that can be predicted."""
        return range(1, 1 + len(self.recall["gate"]["plain"]["depth_1"]["recall"]))

    def loss(self, variant: str) -> float:
        """Rise of perplexity in percent."""
        return 100 * (self.quality[variant]["perplexity"] / self.quality["exact"]["perplexity"] - 1)


def of_mini(found: Mapping[str, Any]) -> Found:
    """What `benchmarks.speculating` wrote."""
    report = QualityReport.model_validate(found["quality"])
    single = QualityReport.model_validate(found["layers_alone"])
    layers = range(1, len(found["hybrid"]))
    kl = {(v.predictor, v.layers): v.figures[ALL].kl for v in single.variants}
    return Found(
        model=found["model"],
        recall=found["recall"],
        hybrid=found["hybrid"],
        quality={v.name: v.figures[ALL].model_dump() for v in report.variants},
        greedy={v.name: v.greedy.model_dump() for v in report.variants if v.greedy is not None},
        alone={name: [kl.get((name, (layer,))) for layer in layers] for name in ALONE},
        said=f"measured on {found['machine']}, {found['recall']['tokens']:,} held-out tokens",
    )


def of_topo(found: Mapping[str, Any]) -> Found:
    """What `recipes.topo.run` wrote."""
    tiny = ", tiny" if found["tiny"] else ""
    return Found(
        model=f"topo{tiny}",
        recall=found["recall"],
        hybrid=found["hybrid"]["depth_1"],
        quality=found["quality"]["all"],
        greedy={},
        alone={
            name: [None if one is None else one["kl"] for one in values[1:]]
            for name, values in found["layers_alone"].items()
        },
        said=f"measured on {found['machine']}, {found['quality']['all']['exact']['tokens']:,} held-out tokens",
    )


def markdown(models: Sequence[Found]) -> str:
    """Everything, a section for each table."""
    parts = ["# Speculating Experts: predicting the next layers' experts, and executing what was predicted\n"]
    for one in models:
        parts += [f"## {one.model}\n", f"Source: {one.said}.\n", _recall(one), _quality(one), _layers(one), _why(one)]
    return "\n".join([*parts, _paper()]) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        f"| {' | '.join(head)} |",
        "|---|" + "---:|" * (len(head) - 1),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _recall(one: Found) -> str:
    rows = []
    for name in PREDICTORS:
        for depth, plain in one.recall[name]["plain"].items():
            mean = plain["mean"]
            rolled = one.recall[name]["rolled"].get(depth, plain)["mean"]["recall"]
            shown = [f"{mean[key]:.3f}" for key in ("recall", "weighted", "recall_2k")]
            shown += [f"{mean['recall']:.2f}, {mean['recall_2k'] / 2:.2f}", f"{mean['cosine']:.3f}", f"{rolled:.3f}"]
            rows.append([name, depth.removeprefix("depth_"), *shown])
    head = ("predictor", "layers ahead", "recall@k", "of router weight", "recall@2k", "used of copies: k, 2k")
    return _table((*head, "drift: cosine", "rolled recall@k"), rows) + "\nMeans over layers.\n"


def _quality(one: Found) -> str:
    rows = []
    for name in (name for name in VARIANTS if name in one.quality):
        figures, greedy = one.quality[name], one.greedy.get(name)
        shown = [f"{figures['perplexity']:.3f}", f"{one.loss(name):+.2f} %", f"{figures['kl']:.4f}"]
        shown.append(f"{figures['top1_agreement']:.1%}")
        shown.append("" if greedy is None else f"{greedy['agreement']:.1%}, {greedy['first_divergence']:.1f}")
        rows.append([name, *shown])
    head = ("all layers but the first execute", "perplexity", "loss", "KL, nats", "same first choice")
    return _table((*head, "same greedy tokens, first other one"), rows)


def _layers(one: Found) -> str:
    rows = []
    for at, layer in enumerate(one.layers):
        found = [one.recall[name]["plain"]["depth_1"] for name in PREDICTORS]
        shown = [f"{figures['recall'][at]:.3f} ({figures['weighted'][at]:.3f})" for figures in found]
        rows.append([str(layer), *shown, *(_kl(one.alone[name][at]) for name in ALONE), str(one.hybrid[layer])])
    head = ("MoE layer", *(f"{name}: recall@k (of weight)" for name in PREDICTORS))
    return _table((*head, *(f"KL, {name} here alone" for name in ALONE), "hybrid takes"), rows)


def _kl(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _why(one: Found) -> str:
    """How much of Router-PF's loss Hybrid-PF recovers, and what any choice per layer could."""
    share = 1 - one.loss("hybrid_pf") / one.loss("router_pf")
    said = f"Hybrid-PF recovers {share:.1%} of the perplexity that Router-PF loses."
    pairs = [
        (layer, router, estimator)
        for layer, router, estimator in zip(one.layers, *(one.alone[name] for name in ALONE), strict=True)
        if router is not None and estimator is not None
    ]
    if not pairs:
        return said + "\n"
    total, best = sum(router for _, router, _ in pairs), sum(min(router, other) for _, router, other in pairs)
    better = [str(layer) for layer, router, estimator in pairs if estimator < router]
    first, worst, _ = max(pairs, key=lambda pair: pair[1])
    where = ", ".join(better) or "none"
    return (
        f"{said} Layers alone: those of Router-PF cost {total:.4f} nats in sum, {worst / total:.0%} of it at layer "
        f"{first}; the estimator costs less at {len(better)} of {len(pairs)} layers ({where}), and the cheaper of both "
        f"at every layer would cost {best:.4f}: a choice per layer can recover {1 - best / total:.0%} of that sum at "
        "most. Hybrid chooses by recall on other text.\n"
    )


def _paper() -> str:
    parts = ["## Published accuracy\n"]
    for model in ("qwen3-30b-a3b", "gpt-oss-20b"):
        rows = [[task, *(f"{v:.3f}" for v in values)] for task, values in PAPER[model].items()]
        kept = [values[1] / values[0] - 1 for values in PAPER[model].values()]
        rows.append(["mean change", "", f"{sum(kept) / len(kept):+.1%}"])
        parts.append(_table((model, *PAPER["columns"]), rows))
    return "\n".join([*parts, f"Source: {PAPER['source']}."])


def main(args: Sequence[str] | None = None) -> str:
    """Read, write, return the text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mini", type=Path, default=RESULTS / "speculating-mini.json")
    parser.add_argument("--topo", type=Path, default=TOPO)
    parser.add_argument("--out", type=Path, default=RESULTS / "speculating.md")
    given = parser.parse_args(args)
    text = markdown([of_mini(read_mapping(given.mini, "results")), of_topo(read_mapping(given.topo, "results"))])
    write_text(given.out, text)
    return text


if __name__ == "__main__":
    print(main())
