"""Probes of steps over several tokens: blocks, groups of experts, drafts and draws (names: `profiler.schema`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from foreload.backend.experts.batch import Batch
from foreload.backend.experts.blocks import run_expert
from foreload.backend.policy.window import demand_of
from foreload.backend.sampling import Sampler, Sampling
from foreload.backend.speculate.accept import judge
from foreload.backend.speculate.base import Drafter, Proposal
from foreload.backend.speculate.ngram import NgramDrafter
from foreload.profiler.bench import Bench
from foreload.profiler.probes import predicted
from foreload.profiler.schema import PROBED_CONTEXT, Measurement
from foreload.profiler.stats import gpu_microseconds, host_samples, summarise

TOKENS = (1, 2, 4, 8)
BLOCKS = ("embed", "attention", "route", "predict", "plan", "finish", "head")


def routed(experts: list[int], tokens: int, each: int, alike: bool, turn: int) -> NDArray[np.int64]:
    """Experts [tokens, each]: the same for all tokens, or as different as there are."""
    shift = 0 if alike else each
    return np.asarray(
        [[experts[(turn + token * shift + i) % len(experts)] for i in range(each)] for token in range(tokens)]
    )


def resident_windows(bench: Bench, rounds: int) -> Iterator[Measurement]:
    """Blocks of steps over several tokens, and groups of resident experts that see several tokens."""
    stage, layers, k = bench.stage("fetch"), bench.shape.n_moe_layers, bench.shape.top_k
    blocks: dict[tuple[str, int], list[float]] = {}
    groups: dict[tuple[int, int], list[float]] = {}
    routings: dict[tuple[int, int], NDArray[np.int64]] = {}
    for tokens, each, alike in product(TOKENS, (1, k), (True, False)):
        for turn in range(-1, max(1, rounds // 2)):
            for layer in range(layers):
                asked = routed(stage.resident, tokens, each, alike, turn + layer)
                spans = bench.layer_step(layer, asked, PROBED_CONTEXT, depth=min(1, layers - 1 - layer))
                if turn < 0:
                    continue
                group = len(np.unique(asked)), asked.size
                routings[group] = asked
                groups.setdefault(group, []).append(spans["experts_gpu"])
                for kind in BLOCKS if each == k else ():
                    if kind in spans:
                        blocks.setdefault((kind, tokens), []).append(spans[kind])
    for (kind, tokens), samples in sorted(blocks.items()):
        busy = gpu_microseconds(_block(bench, kind, tokens), rounds, bench.engine.device)
        yield summarise(f"window_{kind}", samples, busy, tokens=tokens)
    for (experts, tokens), samples in sorted(groups.items()):
        if tokens > 1:
            busy = gpu_microseconds(_experts(bench, routings[experts, tokens]), rounds, bench.engine.device)
            yield summarise("window_experts_gpu", samples, busy, experts=experts, tokens=tokens)


def _block(bench: Bench, kind: str, tokens: int) -> Callable[[int], object]:
    """One block alone over several tokens, as the GPU sees it."""
    decoder, shape, x = bench.decoder, bench.shape, bench.hidden(tokens)
    layers, ahead = shape.n_moe_layers, max(1, shape.n_moe_layers - 1)
    ids = torch.zeros(tokens, dtype=torch.long, device=x.device)
    batch = Batch(x, demand_of(routed(list(range(shape.experts)), tokens, shape.top_k, True, 0)))
    weights = torch.ones(tokens, shape.top_k, device=x.device)
    blocks: dict[str, Callable[[int], object]] = {
        "embed": lambda _: decoder.embed(ids),
        "attention": lambda i: decoder.attend(i % layers, x, PROBED_CONTEXT - 1),
        "route": lambda i: decoder.route(i % layers, decoder.moe_input(i % layers, x)),
        "predict": lambda i: predicted(bench, bench.gate, i % ahead, x, 1),
        "finish": lambda i: x + batch.reduce(weights, decoder.shared(i % layers, x)),
        "head": lambda _: decoder.logits(x).argmax(-1),
    }
    return blocks.get(kind, lambda _: None)


def _experts(bench: Bench, asked: NDArray[np.int64]) -> Callable[[int], object]:
    """The experts of a window alone, out of any slots."""
    demand, pool = demand_of(asked), bench.engine.pool
    batch = Batch(bench.hidden(len(asked)), demand)

    def run(turn: int) -> None:
        for i in range(len(demand.experts)):
            batch.store(i, run_expert(batch.input(i), *pool.views((turn + i) % len(pool), 0)))

    return run


def cpu_windows(bench: Bench, rounds: int, threads: int) -> Iterator[Measurement]:
    """Groups of CPU experts that see several tokens, hand-off and result included."""
    stage, layers, k = bench.stage("cpu", threads), bench.shape.n_moe_layers, bench.shape.top_k
    groups: dict[tuple[int, int], list[float]] = {}
    for tokens, each, alike in product(TOKENS[1:], (1, k), (True, False)):
        for turn in range(max(2, rounds // 2)):
            for layer in range(layers):
                asked = routed(stage.absent, tokens, each, alike, turn + layer)
                group = len(np.unique(asked)), asked.size
                groups.setdefault(group, []).append(bench.layer_step(layer, asked)["beside"])
    for (experts, tokens), samples in sorted(groups.items()):
        yield summarise("window_experts_cpu", samples, experts=experts, tokens=tokens, threads=threads)


def drafts(bench: Bench, rounds: int) -> Iterator[Measurement]:
    """Proposing tokens, by how many; choosing at a temperature, by how many places of the window are looked at."""
    yield from _draft(bench, "draft_ngram", NgramDrafter(), rounds)
    if bench.engine.drafts.model is not None:
        yield from _draft(bench, "draft_model", bench.engine.drafts.model, rounds)
    sampler, vocab, device = Sampler(Sampling(temperature=1.0)), bench.shape.vocab, bench.engine.device
    for rows in TOKENS:
        logits = torch.randn(rows, vocab, device=device)
        logits[:-1, 0] = 100.0  # so that the drafts before the last place are kept
        proposal = Proposal([0] * (rows - 1))
        samples = host_samples(lambda _, z=logits, p=proposal: judge(sampler, z, p), rounds, device)  # type: ignore[misc]
        yield summarise("sample", samples, tokens=rows)


def _draft(bench: Bench, probe: str, drafter: Drafter, rounds: int) -> Iterator[Measurement]:
    """One kind of draft after a text of `PROBED_CONTEXT` tokens that repeats itself and grows as in decode."""
    sampler, most = Sampler(Sampling()), bench.decoder.context_tokens
    for gamma in TOKENS:
        text = [n % 23 % bench.shape.vocab for n in range(min(PROBED_CONTEXT, most // 2))]
        drafter.start(text)

        def propose(_: int, text: list[int] = text, gamma: int = gamma) -> None:
            proposal = drafter.propose(text, gamma, sampler)
            if len(text) + 2 * gamma < most:
                text += proposal.tokens[:2]

        samples = host_samples(propose, rounds, bench.engine.device)
        busy = gpu_microseconds(propose, rounds, bench.engine.device) if probe == "draft_model" else 0.0
        yield summarise(probe, samples, busy, tokens=gamma)
