"""Render the model card of `topo` from its results.

python -m recipes.topo.card --results OUT/topo.json --out recipes/topo/CARD.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from recipes.train.card import table

from .text import SUBJECTS, title

Json = dict[str, Any]
NAMES = {"gate": "gate", "quasi_hidden": "quasi-hidden", "estimator": "estimator", "hybrid": "hybrid"}
VARIANTS = {
    "exact": "exact",
    "router_pf": "Router-PF",
    "est_pf": "Est-PF",
    "hybrid_pf": "Hybrid-PF",
    "router_pf_prefill": "Router-PF, prompt speculated too",
}


def depths(forms: Json) -> list[str]:
    """Names of the measured depths, in order."""
    return sorted(forms["plain"])


def training(result: Json) -> str:
    """How the weights came to be."""
    log = result.get("training")
    rows: list[list[Any]] = [["machine", result["machine"]]]
    rows += [["software", ", ".join(f"{k} {v}" for k, v in result["software"].items())]]
    if log:
        t = log["config"]["train"]
        rows += [
            ["date, seed", f"{log['date']}, {t['seed']}"],
            ["tokens seen", f"{log['tokens']:,} in {log['steps']:,} steps of {t['batch_tokens']:,}"],
            ["time, speed", f"{log['seconds']:.0f} s, {log['tokens_per_second']:,} tokens/s"],
            ["memory", f"{log['peak_memory_bytes'] / 1e9:.1f} GB"],
            ["sequence lengths", ", then ".join(str(p["sequence"]) for p in t["phases"])],
            ["final training loss", f"{log['final_train_loss']:.4f} nats per token"],
        ]
    estimator = result["calibration"]["estimator"]
    rows += [
        ["default vectors", f"{result['calibration']['default_vector_tokens']:,} tokens, "
                            f"{result['calibration']['unseen_experts']} experts unseen"],
        ["estimator", f"{estimator['parameters']:,} parameters, {estimator['tokens']:,} tokens per layer, "
                      f"final KL {estimator['final_kl_nats']:.3f} nats"],
        ["logits against transformers", f"within {result['logit_difference']:.1e}" if "logit_difference" in result
         else "not compared in this run"],
        ["weights", f"SHA-256 `{result['weights_sha256']}` (not shipped)"],
    ]  # fmt: skip
    return table(["", "value"], rows)


def subjects(result: Json) -> str:
    """Bits per byte and next-token overlap per kind of text."""
    rows = [
        [title(kind), f"{result['bits_per_byte'][kind]:.3f}", f"{result['quality'][kind]['exact']['perplexity']:.2f}",
         f"{result['usage_by_subject'][kind]['next_token_overlap']:.3f}",
         f"{result['recall_by_subject'][kind]['quasi_hidden']['depth_1']['recall']:.3f}",
         f"{result['recall_by_subject'][kind]['estimator']['depth_1']['recall']:.3f}"]
        for kind in SUBJECTS
    ]  # fmt: skip
    head = ["subject", "bits per byte", "perplexity", "next-token overlap", "recall quasi-hidden", "recall estimator"]
    return table(head, rows)


def recall_means(result: Json) -> str:
    """Means over target layers by predictor, form and depth."""
    rows = []
    for name, forms in result["recall"].items():
        for form in ("plain", "rolled"):
            for depth in depths(forms):
                if form == "rolled" and depth == "depth_1":
                    continue  # nothing lies in between
                m = forms[form][depth]["mean"]
                rows.append([NAMES[name], form, depth.removeprefix("depth_"), f"{m['recall']:.3f}",
                             f"{m['weighted']:.3f}", f"{m['recall_2k']:.3f}", f"{m['cosine']:.3f}"])  # fmt: skip
    return table(["predictor", "form", "depth", "recall@k", "weighted", "recall at 2k", "cosine"], rows)


def published(result: Json) -> str:
    """Ours beside the published figures."""
    recall, overlap = result["recall"], result["usage"]["next_token_overlap_mean"]

    def mean(name: str, depth: int, metric: str = "recall") -> str:
        entry = recall[name]["plain"].get(f"depth_{depth}")
        return f"{entry['mean'][metric]:.2f}" if entry else "-"

    rows = [
        ["recall@k, depth 1, Qwen3-30B-A3B", ".90", mean("quasi_hidden", 1)],
        ["recall@k, depth 1, trained estimator", "about .90", mean("estimator", 1)],
        *[
            [f"recall@k, depth {h}, 512-expert model", p, mean("quasi_hidden", h)]
            for h, p in enumerate((".78", ".66", ".56", ".50"), 1)
        ],
        ["recall at width k, then 2k", ".775, .92", f"{mean('gate', 1)}, {mean('gate', 1, 'recall_2k')}"],
        ["next-token overlap, 512-expert model", ".37", f"{overlap:.2f}"],
    ]
    return table(["figure", "published", "topo"], rows)


def layers(result: Json) -> str:
    """Load, overlap and recall at depth 1, layer by layer."""
    usage, rows = result["usage"], []
    for n in range(len(usage["dead"])):
        row = [n, f"{usage['load_min'][n]:.2f}", f"{usage['load_max'][n]:.2f}", usage["dead"][n],
               f"{usage['entropy_bits'][n]:.2f}", f"{usage['next_token_overlap'][n]:.2f}",
               f"{usage['distance_between_subjects'][n]:.2f}"]  # fmt: skip
        for name in ("gate", "quasi_hidden", "estimator"):
            entry = result["recall"][name]["plain"]["depth_1"]
            row.append(f"{entry['recall'][n - 1]:.2f}" if n else "")
        for name in ("quasi_hidden", "gate"):
            row.append(f"{result['recall'][name]['plain']['depth_1']['cosine'][n - 1]:.2f}" if n else "")
        row.append(NAMES[result["hybrid"]["depth_1"][n]] if n else "")
        for kind in ("quasi_hidden", "estimator"):
            alone = result.get("layers_alone", {}).get(kind, [])
            row.append(f"{alone[n]['kl'] * 1e3:.2f}" if n < len(alone) and alone[n] else "")
        rows.append(row)
    head = ["layer", "least load", "greatest load", "dead", "entropy (bits)", "overlap", "distance", "gate",
            "quasi-hidden", "estimator", "cos q", "cos plain", "hybrid", "KL alone, router (1e-3)",
            "KL alone, estimator (1e-3)"]  # fmt: skip
    return table(head, rows)


def quality(result: Json) -> str:
    """Perplexity, KL and agreement of every variant by kind of text."""
    rows = []
    for kind in (*SUBJECTS, "all"):
        exact = result["quality"][kind]["exact"]["perplexity"]
        for name, label in VARIANTS.items():
            m = result["quality"][kind][name]
            rows.append([title(kind), label, f"{m['perplexity']:.3f}", f"{(m['perplexity'] / exact - 1) * 100:+.2f} %",
                         f"{m['kl']:.4f}", f"{m['top1_agreement']:.4f}"])  # fmt: skip
    return table(["subject", "variant", "perplexity", "change", "KL (nats)", "top-1 agreement"], rows)


def recovered(result: Json) -> str:
    """How much of Router-PF's loss Hybrid-PF takes back."""
    every = result["quality"]["all"]
    exact, router, hybrid = (every[n]["perplexity"] for n in ("exact", "router_pf", "hybrid_pf"))
    if router <= exact:
        return "Router-PF loses no perplexity here."
    return f"Hybrid-PF recovers {(router - hybrid) / (router - exact) * 100:.0f} % of Router-PF's perplexity loss."


def recordings(result: Json) -> str:
    """The files."""
    rows = [
        [f"`{r['name']}`", ", ".join(title(s) for s in r["subjects"]), r["rows"], r.get("accepted_per_step", ""),
         r.get("distinct_8_grams", ""), f"{r['bytes']:,}"]
        for r in result["recordings"]
    ]  # fmt: skip
    head = ["recording", "subject", "rows", "accepted drafts per step", "distinct 8-grams", "bytes"]
    return table(head, rows)


def excerpts(result: Json) -> str:
    """What the model writes."""
    return "\n\n".join(f"`{n}`\n\n~~~text\n{text.strip()}\n~~~" for n, text in result["excerpts"].items())


CARD = """# topo

A Mixture-of-Experts language model with the topology of Qwen3-30B-A3B ({depth} layers, {experts} experts per layer,
top-{top_k}) and narrow layers (hidden size {hidden}, expert width {width}), trained from scratch on the texts of
`mini`: {parameters} parameters. It is there to route as a learned model does; its recordings are shipped in
`traces/samples/`, its weights are not. A later run of `recipes.topo.run` gives statistically the same model, not the
same bits. All figures here are measured on held-out text, except where a table says published.

## Held-out text

{subjects}

Next-token overlap: share of a token's experts that the token before it used in the same layer (chance: {chance:.3f}).

## Beside published figures

{published}

{notes}

## Prediction

Means over target layers. Weighted: share of router weight covered. Cosine: expected against true router input
(quasi-hidden: q; gate: the plain input). `hybrid` takes per layer what had the best recall on other documents.

{recall}

## Executing predictions

Teacher-forced on windows with a prompt of {prompt} tokens that routes truly; all layers but the first are speculated
after it. KL is of exact against the variant.

{quality}

{recovered}

## Layer by layer

Load is relative to uniform; an expert under a tenth of it counts as dead. Distance: mean total variation between the
loads of two subjects. Recall@k and cosine at depth 1 by target layer. The last columns: KL when that layer alone is
speculated.

{layers}

## Recordings

{recordings}

## Text it writes

{excerpts}

## Provenance

{training}
"""


def card(result: Json, notes: str) -> str:
    """The whole card."""
    c = result["shape"]
    return CARD.format(
        depth=c["layers"], experts=c["experts"], top_k=c["top_k"], hidden=c["hidden"], width=c["expert_width"],
        parameters=f"{result['parameters']:,}", chance=c["top_k"] / c["experts"], prompt=result["quality_prompt"],
        subjects=subjects(result), published=published(result), notes=notes.strip(), recall=recall_means(result),
        quality=quality(result), recovered=recovered(result), layers=layers(result), recordings=recordings(result),
        excerpts=excerpts(result), training=training(result),
    ).replace("\n\n\n\n", "\n\n")  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--notes", type=Path, help="Markdown that explains the differences")
    args = parser.parse_args()
    notes = args.notes.read_text(encoding="utf-8") if args.notes else ""
    args.out.write_text(card(json.loads(args.results.read_text(encoding="utf-8")), notes), encoding="utf-8")


if __name__ == "__main__":
    main()
