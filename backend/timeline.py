"""The measured timeline of one request: what the decoding thread, the link and the CPU experts did when."""

from __future__ import annotations

from foreload.backend.engine import Engine
from foreload.backend.observe import Marks, NoMarks
from foreload.backend.policy.state import DEMAND, PREFETCH
from foreload.traces.timings import Span, span_name

_KINDS = {"submit": "plan", "wait_cpu": "wait"}
_TRACKS = {"experts_gpu": "gpu"}


def measured_spans(engine: Engine, prompt_ids: list[int], tokens: int) -> list[Span]:
    """Generate `tokens` after a prompt and return the spans of its decode steps, time 0 at the first of them."""
    marks = Marks()
    engine.forward.marks = marks
    engine.copies.spans, engine.cpu.spans = [], []
    try:
        engine.generate(prompt_ids, tokens, stop=False)
    finally:
        engine.forward.marks = NoMarks()
        copies, engine.copies.spans = engine.copies.spans, None
        cpu, engine.cpu.spans = engine.cpu.spans, None
    if not marks.spans:
        return []
    zero = marks.spans[0][3]
    steps = [begun for kind, _, _, begun, _ in marks.spans if kind == "embed"]

    def span(track: str, kind: str, layer: int, expert: int, begun: int, done: int, size: int = 0) -> Span:
        step = sum(1 for start in steps if start <= begun) - 1
        name = span_name(kind, layer, expert)
        return Span(track, kind, name, (begun - zero) / 1e3, (done - begun) / 1e3, step, layer, expert, size)

    found = [
        span(_TRACKS.get(kind, "host"), _KINDS.get(kind, kind), layer, expert, begun, done)
        for kind, layer, expert, begun, done in marks.spans
    ]
    for copy in copies:
        if copy.issued_ns >= zero:
            kind = {DEMAND: "fetch", PREFETCH: "prefetch"}.get(copy.purpose, "upload")
            layer, expert = divmod(copy.key, engine.shape.experts)
            found.append(span("link", kind, layer, expert, copy.issued_ns, copy.landed_ns, engine.expert_bytes))
    found += [span("cpu", "experts_cpu", layer, -1, begun, done) for layer, _, begun, done in cpu]
    return sorted(found, key=lambda s: s.start_us)
