"""Readers of other engines' command lines, written from their documentation alone: nothing of ours is imported here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence

EXPERT_PARTS = ("gate", "up", "down", "gate_up")


def expert_names(block: int) -> list[str]:
    """Names a GGUF file may give to the routed experts of a block."""
    names = []
    for part in EXPERT_PARTS:
        for middle in ("exps", "chexps"):
            names += [f"blk.{block}.ffn_{part}_{middle}.{end}" for end in ("weight", "bias", "scale")]
    return names


def other_names(blocks: Iterable[int]) -> list[str]:
    """Names of tensors that are no routed experts."""
    names = ["token_embd.weight", "output_norm.weight", "output.weight"]
    for block in blocks:
        parts = ["attn_q", "attn_k", "attn_v", "attn_output", "attn_norm", "ffn_norm", "ffn_gate_inp"]
        parts += ["ffn_gate", "ffn_up", "ffn_down", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"]
        parts += ["ffn_gate_inp_shexp"]
        names += [f"blk.{block}.{part}.weight" for part in parts] + [f"blk.{block}.exp_probs_b.bias"]
    return names


def override_rules(words: Sequence[str]) -> list[tuple[str, str]]:
    """(pattern, buffer type) of the one -ot of a command: split at commas, then at the first equals sign."""
    at = [index for index, word in enumerate(words) if word in ("-ot", "--override-tensor")]
    assert len(at) <= 1, "several -ot: only the last would count"
    if not at:
        return []
    rules = []
    for entry in words[at[0] + 1].split(","):
        assert "=" in entry, entry
        pattern, buffer_type = entry.split("=", 1)
        rules.append((pattern, buffer_type))
    return rules


def hits(rules: Sequence[tuple[str, str]], name: str) -> list[str]:
    """Buffer types of all rules whose pattern is found in the name."""
    return [buffer_type for pattern, buffer_type in rules if re.search(pattern, name)]


def llama_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The options of llama-server that placement depends on."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-m", required=True)
    parser.add_argument("-ngl", required=True)
    parser.add_argument("-fit", choices=["on", "off"])
    parser.add_argument("-c", type=int, required=True)
    parser.add_argument("-ts")
    parser.add_argument("-ot")
    parser.add_argument("-ncmoe", type=int)
    parser.add_argument("-t", type=int)
    parser.add_argument("-fmoe", action="store_true")
    parser.add_argument("--moe-cache-mib", type=int)
    assert words[0] == "llama-server"
    return parser.parse_args(list(words[1:]))


def split_layers(shares: str, layers: int) -> list[int]:
    """Device of each block: the block's share of (blocks + output) against the running sum of the shares."""
    parts = [float(part) for part in shares.split(",")]
    running = [sum(parts[: at + 1]) / sum(parts) for at in range(len(parts))]
    return [next(at for at, end in enumerate(running) if block / (layers + 1) < end) for block in range(layers + 1)]


def vllm_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Offloading options of `vllm serve`."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--offload-backend", choices=["auto", "uva", "prefetch"])
    parser.add_argument("--offload-group-size", type=int, default=0)
    parser.add_argument("--offload-num-in-group", type=int, default=1)
    parser.add_argument("--offload-prefetch-step", type=int, default=1)
    parser.add_argument("--offload-params", nargs="+", default=[])
    parser.add_argument("--cpu-offload-gb", type=float, default=0)
    parser.add_argument("--cpu-offload-params", nargs="+", default=[])
    assert list(words[:2]) == ["vllm", "serve"]
    return parser.parse_args(list(words[3:]))


def kt_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Options of sglang-kt."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name in ("--model", "--kt-weight-path"):
        parser.add_argument(name, required=True)
    parser.add_argument("--kt-method", choices=["AMXINT4", "AMXINT8", "LLAMAFILE", "BF16", "FP8", "RAWINT4", "MXFP4"])
    for name in ("--kt-cpuinfer", "--kt-threadpool-count", "--kt-num-gpu-experts", "--context-length"):
        parser.add_argument(name, type=int)
    parser.add_argument("--kt-max-deferred-experts-per-token", type=int)
    parser.add_argument("--kt-gpu-experts-ratio", type=float)
    parser.add_argument("--kt-expert-placement-strategy", choices=["uniform", "frequency", "front-loading", "random"])
    parser.add_argument("--init-expert-location")
    parser.add_argument("--disable-shared-experts-fusion", action="store_true", required=True)
    assert list(words[:3]) == ["python", "-m", "sglang.launch_server"]
    return parser.parse_args(list(words[3:]))


def freetoken_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Options of `ft serve`."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--moe-strategy", choices=["fused", "offload", "cpu", "hybrid"], required=True)
    parser.add_argument("--moe-cache-rate", type=float, required=True)
    parser.add_argument("--kv-reserve-tokens", type=int)
    parser.add_argument("--moe-hybrid-max-fetch", type=int)
    parser.add_argument("--moe-cpu-threads", type=int)
    assert list(words[:2]) == ["ft", "serve"]
    return parser.parse_args(list(words[2:]))
