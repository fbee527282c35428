"""The measured timeline: what the decoding thread, the link and the CPU experts did when."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

from foreload.backend.engine import Engine
from foreload.backend.experts.transfer import CopySpan
from foreload.backend.observe import Marks, NoMarks
from foreload.backend.policy.state import AHEAD, DEMAND, PREFETCH
from foreload.traces.timings import Span, span_name

_KINDS = {"submit": "plan", "issue": "plan", "wait_cpu": "wait"}
_TRACKS = {"experts_gpu": "gpu"}


@contextmanager
def timed(engine: Engine) -> Iterator[list[Span]]:
    """While the block runs, measure the engine's decode steps; the list holds their spans, in order, when it has ended.

    Time 0 is the beginning of the first step; steps are counted over all requests of the block.
    """
    marks, spans = Marks(), list[Span]()
    engine.forward.marks = marks
    engine.copies.spans, engine.cpu.spans = [], []
    try:
        yield spans
    finally:
        engine.forward.marks = NoMarks()
        copies, engine.copies.spans = engine.copies.spans, None
        cpu, engine.cpu.spans = engine.cpu.spans, None
        if marks.spans:
            spans += sorted(_spans(engine, marks, copies, cpu), key=lambda span: span.start_us)


def measured_spans(engine: Engine, prompt_ids: list[int], tokens: int) -> list[Span]:
    """Generate `tokens` after a prompt and return the spans of its decode steps."""
    with timed(engine) as spans:
        engine.generate(prompt_ids, tokens, stop=False)
    return spans


def _spans(
    engine: Engine, marks: Marks, copies: list[CopySpan], cpu: list[tuple[int, int, int, int]]
) -> Iterator[Span]:
    zero = marks.spans[0][3]
    steps = _step_starts(marks)

    def span(track: str, kind: str, layer: int, expert: int, begun: int, done: int, size: int = 0) -> Span:
        step, name = bisect_right(steps, begun) - 1, span_name(kind, layer, expert)
        return Span(track, kind, name, (begun - zero) / 1e3, (done - begun) / 1e3, step, layer, expert, size)

    for kind, layer, expert, begun, done in marks.spans:
        yield span(_TRACKS.get(kind, "host"), _KINDS.get(kind, kind), layer, expert, begun, done)
    for copy in copies:
        if copy.issued_ns >= zero:
            kind = {DEMAND: "fetch", PREFETCH: "prefetch", AHEAD: "prefetch"}.get(copy.purpose, "upload")
            layer, expert = divmod(copy.key, engine.shape.experts)
            yield span("link", kind, layer, expert, copy.issued_ns, copy.landed_ns, engine.layer_bytes[layer])
    for layer, _, begun, done in cpu:
        yield span("cpu", "experts_cpu", layer, -1, begun, done)


def _step_starts(marks: Marks) -> list[int]:
    """When each step began: with its draft, or without one with its embedding."""
    starts, drafting = [], False
    for kind, _, _, begun, _ in marks.spans:
        if kind == "draft" or (kind == "embed" and not drafting):
            starts.append(begun)
        if kind in ("draft", "embed"):
            drafting = kind == "draft"
    return starts
