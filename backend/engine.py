"""`Engine`: a model with its experts in host memory, decoding one sequence at a time under live settings."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from foreload.backend.applied import Applied, Watch
from foreload.backend.experts.blocks import BlockCodec
from foreload.backend.experts.check import check_placement
from foreload.backend.experts.cpu import check_read_ahead, make_cpu_experts
from foreload.backend.experts.link import CudaLink, HostLink, Link
from foreload.backend.experts.pool import SlotPool
from foreload.backend.experts.slab import HostSlab
from foreload.backend.experts.transfer import Copies, CopyThread
from foreload.backend.follow import Follower, StopGeneration
from foreload.backend.forward import Forward
from foreload.backend.generation import DecodeStep, Generation
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.models.decoder import Decoder
from foreload.backend.observe import Observer
from foreload.backend.options import EngineOptions, available_bytes, working_bytes
from foreload.backend.placement import other_cores, place_threads
from foreload.backend.policy import Brain, SplitCosts, compile_policies
from foreload.backend.predict import Predictor
from foreload.backend.predict.lens import Lens
from foreload.backend.predict.lookahead import Shadow
from foreload.backend.predict.workshop import Workshop
from foreload.backend.replay import Replay, ReplayStep
from foreload.backend.sampling import Sampler, Sampling
from foreload.backend.speculate.accept import judge
from foreload.backend.speculate.base import Proposal
from foreload.backend.speculate.drafts import Drafts
from foreload.backend.speculate.model import ModelDrafter, draft_bytes, open_draft
from foreload.backend.turns import Turns
from foreload.backend.warm import warm_start
from foreload.budget import slot_budget
from foreload.errors import ReloadError, UsageError
from foreload.formats import block_layout, layer_bytes, layer_formats, slot_bytes
from foreload.settings import Settings, check_slots
from foreload.units import format_bytes

CostsFor = Callable[[Settings], SplitCosts]
__all__ = ["CostsFor", "Engine", "EngineOptions", "available_bytes"]

SPARE_CORES = 3
"""So many cores beside the decoding thread's, and it stays on its own."""


class Engine:
    """One model, one device, one request at a time. Close it, or use it as a context manager."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: EngineOptions,
        settings: Settings | None = None,
        costs: CostsFor | None = None,
        progress: Callable[[int, int], None] | None = None,
        warm: NDArray[np.int64] | None = None,
    ) -> None:
        """Load the model and take the settings (default: `Settings()`).

        `costs(settings)` gives what some settings decide by (`simulator.costs.split_costs` of a profile). `warm`
        [MoE layers, experts]: uses in a recording, by which residents are loaded now (`traces.histogram.warm_counts`).
        Raises BudgetError if device memory cannot hold the dense weights, the KV cache, staging and the slots.
        """
        settings = settings or Settings()
        if options.context_tokens > checkpoint.shape.max_positions:
            limit = checkpoint.shape.max_positions
            raise UsageError(f"context_tokens {options.context_tokens} exceeds the model's {limit} positions")
        Drafts.check(settings, options.context_tokens)
        check_read_ahead(settings)
        named = settings.draft.model_name
        draft = None if named is None else open_draft(named, checkpoint, options.context_tokens)
        self.checkpoint, self.options, self.shape = checkpoint, options, checkpoint.shape
        self.dtype_name = options.resolved_dtype
        self._draft_bytes = 0 if draft is None else draft_bytes(draft, self.dtype_name, options.context_tokens)
        self.device = torch.device(options.device)
        dtype = getattr(torch, self.dtype_name)
        self.formats = layer_formats(settings.expert_format, self.shape, self.dtype_name)
        self.layer_bytes = layer_bytes(self.formats, self.shape)
        self.expert_bytes = slot_bytes(self.formats, self.shape)
        self._vram_bytes = available_bytes(options)
        self.slot_limit = self._slot_limit(settings)
        self.capacity = check_slots(settings, self.shape, self.slot_limit, self.expert_bytes)
        settings.speculated(self.shape)
        workshop = Workshop(checkpoint, options.calibration)
        workshop.check(settings)
        self.tokenizer = checkpoint.tokenizer()
        torch.set_num_threads(1)  # an operator that wakes torch's own would take the CPU experts' cores
        compile_policies()
        self._costs = costs
        self._warm = warm
        self.brain = Brain(self.shape, settings, self.capacity, self._split_costs(settings), warm)
        decoder = Decoder(checkpoint, self.device, dtype, options.context_tokens)
        self._predictors = workshop.open(decoder)
        codecs = [BlockCodec(block_layout(format, self.shape), self.shape, dtype) for format in self.formats]
        self.pool = SlotPool(codecs, self.expert_bytes, self.device)
        self.pool.grow(self.brain.slots)
        pinned = options.device == "cuda"
        self.slab = HostSlab(checkpoint, dtype, pinned, progress, self.formats)  # last: it takes the longest
        check_placement(checkpoint, self.slab, self.pool, decoder, self.device)
        self.cpu = make_cpu_experts(self.slab, self._workers(settings))
        self.link_bytes_per_s = options.link_bytes_per_s
        self.copies, self.forward, self.path = self._open_forward(decoder)
        if options.shadow:
            self.forward.shadow = Shadow(self.shape.n_moe_layers)
        self.settings = settings
        context, vocab = options.context_tokens, self.shape.vocab
        self.drafts = Drafts(None if draft is None else ModelDrafter(draft, self.device, dtype, context, vocab), named)
        self._request = threading.Lock()
        self._turns = Turns()
        self._follow(settings, self._predictors.use(settings))
        self.warm_start = warm_start(self.copies, self.layer_bytes)

    @classmethod
    def load(cls, model: str, options: EngineOptions | None = None, settings: Settings | None = None) -> Engine:
        """Engine of MODEL (a Hugging Face folder or a bundled name)."""
        return cls(Checkpoint.open(model), options or EngineOptions(), settings)

    def _slot_limit(self, settings: Settings) -> int:
        context = self.options.context_tokens
        beside = self._draft_bytes + working_bytes(self.options, self.shape, settings)
        return slot_budget(self.shape, self.dtype_name, self._vram_bytes, context, settings, beside)

    def _open_forward(self, decoder: Decoder) -> tuple[Copies, Forward, str]:
        """What decodes, and how, in words: graphs on a GPU where this machine has what they need, else eager blocks."""
        why = "device cpu"
        if self.options.device == "cuda":
            from foreload.backend.cuda.open import missing, open_fast

            why = "asked for" if self.options.eager else missing(self.slab.layouts, self.shape) or ""
            if not why:
                fast = open_fast(decoder, self.brain, self.slab, self.pool, self.cpu, self.options.debug_seed)
                self._throttle = fast[1].throttle
                if self.link_bytes_per_s is not None:
                    self._throttle(self.link_bytes_per_s)
                return *fast, "graphs"
        link = self.make_link()
        self._throttle = link.throttle
        copies = CopyThread(self.brain, self.slab, self.pool, link)
        poison = self.options.debug_seed is not None
        forward = Forward(decoder, self.slab, self.pool, link, copies, self.cpu, poison)
        return copies, forward, f"eager ({why})"

    def make_link(self) -> Link:
        """A link of this engine's kind."""
        seed = self.options.debug_seed
        delay = None if seed is None else Random(seed)
        if self.options.device == "cuda":
            return CudaLink(self.device, delay, self.link_bytes_per_s)
        return HostLink(self.link_bytes_per_s, delay)

    def throttle(self, link_bytes_per_s: int | None) -> None:
        """Emulate a link of this rate, at most the real one's, from the next copy on; None: the real one."""
        with self._turns.guest():
            self._throttle(link_bytes_per_s)
            self.link_bytes_per_s = link_bytes_per_s

    def _split_costs(self, settings: Settings) -> SplitCosts | None:
        needed = settings.needs_costs is not None and self._costs is not None
        return self._costs(settings) if needed and self._costs is not None else None

    @staticmethod
    def _workers(settings: Settings) -> int:
        return 0 if settings.miss_action == "fetch" else settings.cpu_threads

    def _follow(self, settings: Settings, used: Predictor | None) -> None:
        width, layers = settings.width(self.shape), settings.speculated(self.shape)
        self.forward.look_ahead.follow(used, settings.prefetch_depth, width, layers)
        self.drafts.follow(settings)
        if self.forward.replay is None:  # a replay gets ready for the steps it has
            self.forward.prepare(range(1, settings.draft.gamma + 2))

    def use_costs(self, costs: CostsFor) -> None:
        """What settings that are applied from now on decide by (see `__init__`)."""
        self._costs = costs

    def warm_by(self, counts: NDArray[np.int64] | None) -> None:
        """Uses in a recording (see `__init__`) by which residents are loaded from the next `reset_cache` on."""
        self._warm = counts
        self.brain.warm_by(counts)

    def predictor(self, name: str, rolled: bool = False) -> Predictor:
        """A predictor of this model; SettingsError if it needs a calibration and there is none."""
        return self._predictors.make(name, rolled)

    @property
    def calibrated(self) -> bool:
        """Whether there is a calibration of this model."""
        return self._predictors.available

    @property
    def true_recall(self) -> dict[int, float]:
        """With `shadow`: per speculated MoE layer, the share of its gate's experts that was executed."""
        return self.forward.shadow.recall() if self.forward.shadow is not None else {}

    def apply(self, settings: Settings) -> Applied:
        """Take new settings between two tokens, also of a running request.

        Residents stay as far as the new slots allow. Raises BudgetError (with the shortfall) or SettingsError; the old
        settings then stay in force.
        """
        Drafts.check(settings, self.options.context_tokens)
        check_read_ahead(settings)
        self._check_format(settings)
        self.drafts.check_loaded(settings)
        watch = Watch(self)
        with self._turns.guest():
            settings.speculated(self.shape)
            self._predictors.check(settings)
            watch.begin()
            costs = self._split_costs(settings)
            slot_limit = self._slot_limit(settings)
            capacity = check_slots(settings, self.shape, slot_limit, self.expert_bytes)
            Brain.check(settings, costs, self._warm is not None)
            predictor = self._predictors.use(settings)
            with self.copies.lock:
                self.brain.quiesce()
                self.copies.settle()
                self.pool.grow(Brain.slots_for(self.shape, settings, capacity))
                moves = self.brain.reconfigure(settings, capacity, costs)
                for source, target in moves:
                    self.pool.move(source, target)
                if self.options.device == "cuda":
                    torch.cuda.synchronize(self.device)
                self.pool.shrink(self.brain.slots)
            self.cpu.resize(self._workers(settings))
            self.settings, self.capacity, self.slot_limit = settings, capacity, slot_limit
            self._follow(settings, predictor)
            if settings.admission == "none":  # nothing else would ever fill the new slots
                warm_start(self.copies, self.layer_bytes)
            return watch.end(len(moves))

    def _check_format(self, settings: Settings) -> None:
        if layer_formats(settings.expert_format, self.shape, self.dtype_name) != self.formats:
            raise ReloadError(
                f"expert_format {settings.expert_format!r} needs reload: the experts are loaded as "
                f"{', '.join(sorted(set(self.formats)))}"
            )

    def reset_cache(self) -> None:
        """Forget residents and history, as after loading: a warm start is done again."""
        with self._turns.guest():
            with self.copies.lock:
                self.brain.quiesce()
                self.copies.settle()
                self.brain.drop_cache()
            self.warm_start = warm_start(self.copies, self.layer_bytes)

    def generate(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        sampling: Sampling | None = None,
        observer: Observer | None = None,
        on_token: Callable[[int], None] | None = None,
        stop: bool = True,
        follower: Follower | None = None,
    ) -> Generation:
        """Feed a prompt and generate up to `max_tokens` tokens; `stop` ends at the model's end token.

        Requests from several threads are taken one after the other. `on_token` and `follower` may raise
        `StopGeneration` to end early. UsageError if prompt and answer exceed the context.
        """
        self.check_request(prompt_ids, max_tokens)
        with self._request, torch.inference_mode(), self.forward.watched(observer):
            self.place_helpers()
            before = self.brain.counters.copy()
            follower, sampler = follower or Follower(), Sampler(sampling or Sampling())
            text, steps, ttft_ns = list(prompt_ids), list[DecodeStep](), 0
            stop_ids = self.tokenizer.stop_ids if stop else frozenset()
            end = len(prompt_ids) + max_tokens

            def add(tokens: list[int]) -> None:
                for token in tokens:
                    text.append(token)
                    follower.token(token)
                    if on_token is not None:
                        on_token(token)

            with suppress(StopGeneration):
                start = time.perf_counter_ns()
                logits = self._prefill(prompt_ids, follower)[None]
                follower.logits(logits)
                first = [sampler.draw(logits[0])]
                ttft_ns = time.perf_counter_ns() - start
                add(first)
                while len(text) < end and text[-1] not in stop_ids:
                    start = time.perf_counter_ns()
                    with self._turns.turn():
                        drafted, tokens = self._step(text, end - len(text), sampler, follower, stop_ids)
                    steps.append(DecodeStep(time.perf_counter_ns() - start, drafted, len(tokens)))
                    add(tokens)
            return Generation(len(prompt_ids), text[len(prompt_ids) :], ttft_ns, steps, self.brain.counters - before)

    def replay(
        self, recorded: Replay, request: int, most: int | None = None, context: int | None = None, skip: int = 0
    ) -> Generation:
        """Run the decode steps of a recorded request again, at most `most`; the recording says what they route.

        The prompt is fed first, routed by the model itself; with `context` it is not, and steps begin at that position
        over whatever keys and values are there. The first `skip` steps are left out; the request is then taken to go
        on. Drafts are made, of the recorded text, and verified windows judged, and then forgotten. SettingsError names
        what the recording does not hold, UsageError what does not fit into the context.
        """
        recorded.check(self.settings)
        steps = recorded.steps(request)[skip:][:most]
        prompt = recorded.prompt(request) if context is None else []
        position = len(prompt) if context is None else context
        needed = position + sum(step.emitted for step in steps) + self.settings.draft.gamma
        if needed > self.options.context_tokens:
            raise UsageError(f"replay: {needed} positions do not fit in the context of {self.options.context_tokens}")
        with self._request, torch.inference_mode(), self.forward.watched(None):
            self.place_helpers()
            before, done = self.brain.counters.copy(), list[DecodeStep]()
            text, start = recorded.text(request, skip, position), time.perf_counter_ns()
            if prompt:
                self._prefill(prompt, Follower())
            else:
                self._start_request(text, skip == 0)
            ttft_ns = time.perf_counter_ns() - start
            with self.replaying(recorded):
                self.forward.prepare(sorted({len(step.token_ids) for step in steps}))
                for step in steps:
                    start = time.perf_counter_ns()
                    self._replay_step(recorded, step, text, position)
                    done.append(DecodeStep(time.perf_counter_ns() - start, len(step.token_ids) - 1, step.emitted))
                    position += step.emitted
            tokens = [token for step in steps for token in step.token_ids[: step.emitted]]
            return Generation(len(prompt), tokens, ttft_ns, done, self.brain.counters - before)

    @contextmanager
    def replaying(self, recorded: Replay) -> Iterator[None]:
        """While the block runs, decode steps are those of a recording: settings applied get ready for them alone."""
        before = self.forward.replay
        self.forward.follow(recorded)
        try:
            yield
        finally:
            self.forward.follow(before)

    def _replay_step(self, recorded: Replay, step: ReplayStep, text: list[int], position: int) -> None:
        """One recorded step after `text`, which grows by it."""
        with self._turns.turn():
            sampler, drafted = Sampler(Sampling()), len(step.token_ids) - 1
            text.append(step.token_ids[0])
            self.drafts.propose(text, max(1, drafted), sampler)
            recorded.row = step.row
            logits = self.forward.decode(step.token_ids, position)
            judge(sampler, logits, Proposal(step.token_ids[1:]))
            text += step.token_ids[1 : step.emitted]

    def _step(
        self, text: list[int], most: int, sampler: Sampler, follower: Follower, stop_ids: frozenset[int]
    ) -> tuple[int, list[int]]:
        """One decode step after `text`: how many tokens were drafted, and the 1 to `most` tokens to add."""
        marks, verify = self.forward.marks, self.drafts.on
        marks.start()
        proposal = self.drafts.propose(text, most - 1, sampler)
        if verify:
            marks.mark("draft")
        fed, position = [text[-1], *proposal.tokens], len(text) - 1
        logits = self.forward.decode(fed, position)
        marks.start()
        tokens = judge(sampler, logits, proposal).emitted(proposal, stop_ids)
        if verify:
            marks.mark("sample")
        self.forward.report(fed, position, len(tokens), verify)
        follower.logits(logits[: len(tokens)])
        return len(proposal.tokens), tokens

    def score(self, token_ids: list[int], lens: Lens, logits: bool = True) -> torch.Tensor:
        """Feed tokens as one prompt chunk at position 0 under a lens; logits [n, vocab] after each, if wanted.

        UsageError if there are more tokens than the context holds.
        """
        if len(token_ids) > self.options.context_tokens:
            limit = self.options.context_tokens
            raise UsageError(f"{len(token_ids)} tokens at once exceed the context of {limit} tokens")
        with self._request, torch.inference_mode(), self.forward.watched(None), self._turns.turn():
            with self.copies.lock:
                self.brain.start_request()
                self.copies.settle()
            return self.forward.score(token_ids, lens, logits)

    def place_helpers(self) -> None:
        """Keep the copy thread and the CPU experts off the calling thread's core, on which it decodes."""
        others = other_cores()
        place_threads(self.copies.threads, others)
        self.cpu.place(others)
        [self.forward.home] = (os.sched_getaffinity(0) - others) if len(others) >= SPARE_CORES else {-1}

    def check_request(self, prompt_ids: list[int], max_tokens: int) -> None:
        """UsageError if the request cannot be generated, whatever the settings are."""
        if not prompt_ids:
            raise UsageError("the prompt is empty: at least one token is needed")
        if max_tokens < 1:
            raise UsageError(f"max_tokens {max_tokens} must be at least 1")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.shape.vocab:
            raise UsageError(f"prompt token ids must be from 0 to {self.shape.vocab - 1}")
        needed = len(prompt_ids) + max_tokens
        if needed > self.options.context_tokens:
            raise UsageError(
                f"{len(prompt_ids)} prompt tokens and {max_tokens} new ones exceed the context of "
                f"{self.options.context_tokens} tokens by {needed - self.options.context_tokens}"
            )

    def _prefill(self, prompt_ids: list[int], follower: Follower) -> torch.Tensor:
        """Logits [vocab] after the prompt, fed in chunks of `prefill_chunk_tokens`; others may act between two."""
        self._start_request(prompt_ids)
        logits, at = torch.empty(0), 0
        while at < len(prompt_ids):
            with self._turns.turn():
                chunk = prompt_ids[at : at + self.settings.prefill_chunk_tokens]
                last = at + len(chunk) == len(prompt_ids)
                logits = self.forward.prefill(chunk, at, last, follower.logits if follower.prompt_logits else None)
            follower.fed(len(chunk))
            at += len(chunk)
        return logits

    def _start_request(self, text: list[int], first: bool = True) -> None:
        """Nothing of the last request stays queued or in flight (unless this goes on with it); drafts begin anew."""
        with self._turns.turn():
            if first:
                with self.copies.lock:
                    self.brain.start_request()
                    self.copies.settle()
            self.drafts.start(text)

    def describe_memory(self) -> str:
        """Where the bytes are, on one line."""
        dense = format_bytes(self.forward.decoder.dense_bytes)
        slots = f"{sum(self.capacity)} + {len(self.pool) - sum(self.capacity)} slots"
        device = format_bytes(self.pool.allocated_bytes)
        host = format_bytes(self.slab_bytes)
        return f"device: {dense} dense and KV, {device} in {slots}; host: {host} experts; decode steps: {self.path}"

    @property
    def slab_bytes(self) -> int:
        """Bytes of the host slab."""
        return self.slab.blocks.numel()

    def close(self) -> None:
        """Stop threads and release memory."""
        self.copies.close()
        self.cpu.close()
        self.slab.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
