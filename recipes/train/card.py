"""Render the model cards from the measured results.

python -m recipes.train.card --results recipes/train/results/mini.json --assets foreload/assets
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .config import Config
from .generate import NEW_TOKENS, PROMPT_TOKENS


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; all columns but the first are right-aligned."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def provenance(log: dict[str, Any]) -> str:
    """How the weights came to be."""
    t = log["config"]["train"]
    rows = [
        ["recipe", "`recipes/` (corpus, tokenizer, `recipes.train.pipeline`)"],
        ["machine, date", f"one {log['machine']}, {log['date']}"],
        ["software", f"torch {log['torch']}"],
        ["seed", t["seed"]],
        ["tokens seen", f"{log['tokens']:,} in {log['steps']:,} steps of {t['batch_tokens']:,}"],
        ["time", f"{log['seconds']:.0f} s, {log['tokens_per_second'] / 1e6:.2f} M tokens/s"],
        ["optimiser", f"{t['optimizer']}, peak rates {t['matrix_rate']} (matrices) and {t['adam_rate']} (AdamW)"],
        ["final training loss", f"{log['final_train_loss']:.4f} nats per token"],
        ["logits against transformers", f"largest difference {log['logit_difference']:.1e} in fp32"],
        ["weights", f"{log['weights_bytes']:,} bytes, SHA-256 `{log['weights_sha256']}`"],
    ]
    return table(["", "value"], rows)


def quality(heldout: dict[str, Any]) -> str:
    """Figures per kind of text."""
    rows = [
        [kind, f"{k['bytes']:,}", f"{k['tokens']:,}", f"{k['bits_per_byte']:.3f}", f"{k['perplexity']:.2f}",
         f"{k['next_token_overlap']:.3f}", f"{k['draft_bits_per_byte']:.3f}", f"{k['draft_agreement']:.3f}"]
        for kind, k in heldout["kinds"].items()
    ]  # fmt: skip
    rows.append(["**all**", "", "", f"**{heldout['bits_per_byte']:.3f}**", "", "",
                 f"{heldout['draft_bits_per_byte']:.3f}", f"{heldout['draft_agreement']:.3f}"])  # fmt: skip
    head = ["kind", "bytes", "tokens", "bits per byte", "perplexity", "next-token overlap", "draft bits per byte",
            "draft agreement"]  # fmt: skip
    return table(head, rows)


def routing(heldout: dict[str, Any]) -> str:
    """Figures per layer."""
    rows = [
        [
            r["layer"],
            f"{r['min']:.2f}",
            f"{r['max']:.2f}",
            r["dead"],
            f"{r['entropy_bits']:.2f}",
            f"{o:.3f}",
            f"{d:.3f}",
        ]
        for r, o, d in zip(heldout["load"], heldout["next_token_overlap"], heldout["specialisation"], strict=True)
    ]
    head = ["layer", "least load", "greatest load", "dead experts", "entropy (bits)", "next-token overlap",
            "distance between kinds"]  # fmt: skip
    return table(head, rows)


def acceptance(generation: dict[str, Any]) -> str:
    """Accepted draft tokens per verify step."""
    rows = [[kind, f"{v['gamma_4']:.2f}", f"{v['gamma_8']:.2f}"] for kind, v in generation["accepted"].items()]
    return table(["kind", "γ = 4", "γ = 8"], rows)


def samples(generation: dict[str, Any]) -> str:
    """What the model writes."""
    parts = []
    for s in generation["samples"]:
        parts.append(f"**{s['kind']}**, after `...{' '.join(s['prompt_end'].split())[-80:]}`")
        for title, key in (("greedy", "greedy"), ("temperature .8, top-p .95", "sampled")):
            parts.append(f"{title}:\n\n~~~text\n{s[key].strip()}\n~~~")
    return "\n\n".join(parts)


MINI = """# mini

A small Mixture-of-Experts language model trained from scratch for Foreload's offline demo and tests: {layers} layers,
{experts} experts per layer, top-{top_k}, hidden size {hidden}; {parameters:,} parameters, {active:,} of them active per
token. `Qwen3MoeForCausalLM` in bf16, byte-level BPE of {vocabulary:,} tokens (`<|endoftext|>`, id 0, parts documents).
It writes recognisable English and code and routes as a learned model does; it knows nothing reliably.

Trained on about 130 MB of freely redistributable English text of seven kinds (sources and licences:
`recipes/corpus/SOURCES.md`), at sequence lengths {sequences}.

## Held-out text

Measured in fp32 on the CPU from the bf16 weights, in windows of 1,024 tokens. Documents were set aside by hash before
training. Next-token overlap: share of a token's experts that the token before it used in the same layer (uniform
random choice would give {chance:.3f}). Draft agreement: share of positions where `draft` and mini name the same token.

{quality}

## Routing

Load relative to uniform (1 = {share:.2f} % of the choices) over all held-out text; an expert under a tenth of it counts
as dead. Distance between kinds: mean total variation between the expert loads of two kinds of text.

{routing}

## Speculative decoding with `draft`

Accepted draft tokens per verify step, greedy, {new} new tokens after the first {prompt} tokens of 8 prompts per kind.
Mini's greedy text tends to fall into loops, so these lengths say less about ordinary text than the agreement above.

{acceptance}

## Samples

{samples}

## Provenance

{provenance}
"""

DRAFT = """# draft

A dense `Qwen3ForCausalLM` of {parameters:,} parameters ({layers} layers, hidden size {hidden}) with mini's tokenizer,
trained to reproduce mini's next-token distribution on the same text. Per token it multiplies {active:,} weights,
{ratio:.1f} times fewer than mini. It proposes tokens that mini verifies; what it is worth is in mini's card
(`../mini/README.md`): agreement on held-out text {agreement:.3f}, {g4:.2f} accepted tokens
per step at γ = 4 and {g8:.2f} at γ = 8. Its training loss is the cross-entropy against mini's distribution.

{provenance}
"""


def cards(result: dict[str, Any]) -> dict[str, str]:
    """Both cards."""
    mini, draft = result["models"]["mini"], result["models"]["draft"]
    c, d = Config.from_dict(mini["config"]), Config.from_dict(draft["config"])
    generation, heldout = result["generation"], result["heldout"]
    text = MINI.format(
        layers=c.model.layers, experts=c.model.experts, top_k=c.model.top_k, hidden=c.model.hidden,
        parameters=mini["parameters"], active=mini["active_parameters"], vocabulary=c.model.vocabulary,
        sequences=", then ".join(f"{p.sequence:,}" for p in c.train.phases), chance=c.model.top_k / c.model.experts,
        quality=quality(heldout), share=100 / c.model.experts, routing=routing(heldout), new=NEW_TOKENS,
        prompt=PROMPT_TOKENS, acceptance=acceptance(generation), samples=samples(generation),
        provenance=provenance(mini),
    )  # fmt: skip
    short = DRAFT.format(
        parameters=draft["parameters"], layers=d.model.layers, hidden=d.model.hidden,
        active=draft["active_parameters"], ratio=mini["active_parameters"] / draft["active_parameters"],
        agreement=heldout["draft_agreement"], g4=generation["accepted"]["all"]["gamma_4"],
        g8=generation["accepted"]["all"]["gamma_8"], provenance=provenance(draft),
    )  # fmt: skip
    return {"mini": text, "draft": short}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("recipes/train/results/mini.json"))
    parser.add_argument("--assets", type=Path, default=Path("foreload/assets"))
    args = parser.parse_args()
    for name, text in cards(json.loads(args.results.read_text())).items():
        (args.assets / name / "README.md").write_text(text)


if __name__ == "__main__":
    main()
