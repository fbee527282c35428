"""The engine decides as the simulated engine does, call by call, when copies land in the same order.

The simulator's brain writes a log: every call with what it decided, and every copy issued and landed in between. The
engine then runs the same requests with a brain that checks each call against that log, and copies that are issued and
land where the log says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.experts.transfer import Copies, CopySpan
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import Brain
from foreload.backend.policy.state import DECODE, LANDED
from foreload.backend.recorder import Prompt, record
from foreload.profiler.schema import HardwareProfile, Measurement
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.simulator import split_costs
from foreload.simulator.costs import CostModel
from foreload.simulator.engine_model import EngineModel
from foreload.simulator.workload import load_requests
from foreload.traces.io import read_trace
from foreload.traces.schema import Trace

Entry = tuple[Any, ...]
LOGGED = (
    "begin",
    "prefetch",
    "finish",
    "end_step",
    "prefill_targets",
    "prefill_ahead",
    "prefill_fetch",
    "prefill_done",
    "start_request",
)
REQUESTS, PROMPT_TOKENS, TOKENS = 2, 12, 7


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def called(brain: Brain, tell: Callable[[Entry], None], before: Callable[[], None] = lambda: None) -> None:
    """From now on every call of `brain` is told with its arguments, its result and the residents after it."""
    for name in LOGGED:
        original = getattr(brain, name)

        def run(*given: Any, name: str = name, original: Callable[..., Any] = original) -> Any:
            before()
            result = original(*given)
            kept = brain.state.status.tobytes()
            tell((name, *map(plain, given), plain(result), kept))
            return result

        setattr(brain, name, run)


def simulated_log(
    trace: Trace, costs: CostModel, chosen: Settings, capacity: tuple[int, ...], warm: np.ndarray
) -> list[Entry]:
    """What the simulated engine's brain is asked and answers, and what its link does."""
    log: list[Entry] = []
    model = EngineModel(costs, costs.shape, chosen, capacity, warm=warm)
    called(model.brain, log.append)
    issue, land = model.brain.next_copy, model.brain.complete

    def next_copy(phase: int = DECODE) -> int:
        key = issue(phase)
        log.append(("issue", phase, key))
        return key

    def complete(key: int) -> None:
        log.append(("land", key))
        land(key)

    model.brain.next_copy, model.brain.complete = next_copy, complete  # type: ignore[method-assign]
    model.run(load_requests(trace, costs.shape, chosen), sampled=False)
    return log


class Scripted(Copies):
    """Copies that are issued and land as a log says, on the thread that asks for them."""

    def __init__(self, engine: Engine, log: list[Entry]) -> None:
        self.brain, self.lock, self.phase = engine.brain, threading.Condition(threading.RLock()), DECODE
        self.spans: list[CopySpan] | None = None
        self.threads = []
        self._slab, self._pool, self._order = engine.slab, engine.pool, dict[int, int]()
        self.log, self.at = log, 0
        called(engine.brain, self._check, self._catch_up)

    def _move(self) -> bool:
        """What the link does next, if it is its turn."""
        kind, *rest = self.log[self.at] if self.at < len(self.log) else ("end",)
        if kind == "issue":
            phase, key = rest
            assert self.brain.next_copy(phase) == key, f"entry {self.at}: another copy is next"
            layer, expert = divmod(key, self.brain.shape.experts)
            self._pool.slot(self.brain.slot(layer, expert)).copy_(self._slab.block(layer, expert))
            self._order[key] = self.at
        elif kind == "land":
            self.brain.complete(rest[0])
        else:
            return False
        self.at += 1
        return True

    def _catch_up(self) -> None:
        while self._move():
            pass

    def _check(self, entry: Entry) -> None:
        assert self.at < len(self.log), f"one call more than simulated: {entry[:4]}"
        assert entry == self.log[self.at], f"entry {self.at}: engine {entry[:4]}, simulated {self.log[self.at][:4]}"
        self.at += 1

    def kick(self) -> None:
        """Nothing: the log says when."""

    def take_ready(self, keys: Collection[int]) -> int:
        """The first of `keys` in link order that has landed."""
        while True:
            ready = [key for key in keys if self.brain.status(*divmod(key, self.brain.shape.experts)) == LANDED]
            if ready:
                return min(ready, key=self._order.__getitem__)
            assert self._move(), "the log lands no copy that is waited for"

    def take_all_ready(self, keys: Collection[int]) -> list[int]:
        """Those that have landed before the next call, and that the log serves together."""
        self.take_ready(keys)
        self._catch_up()
        taken: list[int] = []
        for name, *rest in self.log[self.at :]:
            if name in ("issue", "land"):
                continue
            key = rest[0] * self.brain.shape.experts + rest[1] if name == "prefill_done" else -1
            if key not in keys or self.brain.status(*divmod(key, self.brain.shape.experts)) != LANDED:
                break
            taken.append(key)
        return taken

    def wait_landed(self, keys: Collection[int]) -> None:
        """Until all have landed or are residents."""
        for key in keys:
            while self.brain.status(*divmod(key, self.brain.shape.experts)) < LANDED:
                assert self._move(), "the log lands no copy that is waited for"

    def settle(self) -> None:
        """Until nothing is in flight."""
        while self.brain.in_flight():
            assert self._move(), "the log leaves a copy in flight"

    def close(self) -> None:
        """Nothing runs."""


def random_settings(random: Random) -> tuple[Settings, tuple[int, ...]]:
    """Every field the brain looks at, and slots per layer."""
    predictor = random.choice(["none", "gate", "gate", "previous_step", "utility"])
    rule = random.choice(["makespan", "tau", "bandwidth", "per_expert"])
    k = random.randint(1, 4)
    fields: dict[str, Any] = {
        "pool": random.choice(["layer", "shared"]),
        "eviction": random.choice(["lru", "lfu", "lfru", "aged", "static", "utility", "random"]),
        "admission": random.choice(["demand", "background", *(["none"] if predictor in ("none", "gate") else [])]),
        "admit_per_step": random.randint(1, 3),
        "predictor": predictor,
        "prefetch_depth": random.choice([1, 2]) if predictor == "gate" else 0,
        "prefetch_width": random.choice([None, 1, 3]),
        "miss_action": random.choice(["fetch", "cpu", "split"]),
        "split_rule": rule,
        "objective": random.choice(["makespan", "balance"]) if rule in ("makespan", "tau") else "makespan",
        "utility": {
            "k": k,
            "signal": random.choice(["delta", "level"]),
            "adapt": random.choice(["real", "floored", "off"]),
            "tau": random.choice(["auto", random.randint(1, k + 1)]),
            "reset_done": random.random() < 0.5,
        },
        "prefill_chunk_tokens": random.choice([5, 256]),
        "slots_per_layer": tuple(random.randint(0, 8) for _ in range(3)),
    }
    return Settings.parse(fields), fields["slots_per_layer"]


@pytest.fixture(scope="module")
def trace(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    out = tmp_path_factory.mktemp("recording") / "trace.parquet"
    with Engine(Checkpoint.open(str(tiny)), EngineOptions(context_tokens=64), Settings(cache_ratio=0.5)) as engine:
        texts = [Prompt("", engine.tokenizer.decode(list(range(3 + n, 33 + n)))) for n in range(REQUESTS)]
        record(engine, texts, out, prompt_tokens=PROMPT_TOKENS, max_tokens=TOKENS, stop=False, depth=2, width=4)
    return read_trace(out)


def profile_of(make_profile: Callable[..., HardwareProfile], shape: ModelShape, random: Random) -> HardwareProfile:
    """Made-up costs of the tiny model, copies of any speed."""

    size, speed = shape.expert_bytes("float32"), random.choice([2.0, 40.0, 300.0])
    base = make_profile(shape=asdict(shape), shape_hash=shape.hash, expert_bytes=size)
    others = [m for m in base.measurements if m.probe not in ("copy", "copy_beside_cpu")]
    points = (("copy", {"bytes": size, "pinned": 0}, speed), ("copy_beside_cpu", {"threads": 1}, speed * 1.25))
    copies = [Measurement(probe=probe, at=at, p50_us=us, p95_us=us, repeats=1) for probe, at, us in points]
    return HardwareProfile(meta=base.meta, measurements=(*others, *copies))


@pytest.mark.integration
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random=st.randoms(use_true_random=False))
def test_decision_logs_are_equal(
    tiny: Path, trace: Trace, make_profile: Callable[..., HardwareProfile], random: Random
) -> None:
    checkpoint = Checkpoint.open(str(tiny))
    shape = checkpoint.shape
    costs = CostModel(profile_of(make_profile, shape, random), shape)
    chosen, capacity = random_settings(random)
    warm = np.array([[random.randint(0, 3) for _ in range(shape.experts)] for _ in range(3)], np.int64)
    log = simulated_log(trace, costs, chosen, capacity, warm)
    options = EngineOptions(context_tokens=64)
    prompts = [trace.token_id[(trace.request == n) & (trace.phase == 0)].tolist() for n in range(REQUESTS)]
    with Engine(checkpoint, options, chosen, lambda wanted: split_costs(costs, shape, wanted), warm=warm) as engine:
        first = next(at for at, entry in enumerate(log) if entry[0] == "start_request")
        assert engine.warm_start.experts == sum(entry[0] == "issue" for entry in log[:first])
        engine.copies.close()
        scripted = Scripted(engine, log[first:])
        engine.copies = engine.forward._copies = scripted
        for prompt in prompts:
            engine.generate(prompt, TOKENS, stop=False)
        while scripted._move():
            pass
        assert scripted.at == len(scripted.log) > 0
        engine.brain.check_integrity()
