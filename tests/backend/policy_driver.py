"""Drives a brain the way an engine does, with everything an engine does not decide chosen at random.

As a script, prints a digest of what a brain decided in a fixed random run.
"""

from __future__ import annotations

import hashlib
from collections import deque
from random import Random
from typing import Any

import numpy as np

from foreload.backend.policy import Action, Brain, SplitCosts
from foreload.backend.policy.copies import WINDOW
from foreload.backend.policy.state import ABSENT, DECODE, KEPT, LANDED, PREFILL, WARM
from foreload.settings import Settings
from foreload.shape import ModelShape

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def make_shape(layers: int = LAYERS, experts: int = EXPERTS, top_k: int = TOP_K) -> ModelShape:
    return ModelShape(
        family="test", layers=layers, moe_layers=tuple(range(layers)), hidden=4, heads=1, kv_heads=1, head_dim=4,
        vocab=8, experts=experts, top_k=top_k, expert_width=4, scoring="softmax_topk", normalise_weights=True,
        rope_theta=1e4, norm_eps=1e-6, max_positions=64, tied_embeddings=True,
    )  # fmt: skip


SHAPE = make_shape()
COSTS = SplitCosts(100, np.array([0, 10, 20], np.int64), np.array([0, 100, 200], np.int64), 30, 60, 150)


def int32(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


def random_settings(random: Random) -> Settings:
    """Any combination of what the brain looks at."""
    predictor = random.choice(["none", "gate", "gate", "previous_step", "utility"])
    split_rule = random.choice(["makespan", "tau", "bandwidth", "per_expert"])
    ahead = predictor in ("previous_step", "utility")
    return Settings.parse(
        {
            "pool": random.choice(["layer", "shared"]),
            "eviction": random.choice(["lru", "lfu", "lfru", "aged", "static", "utility", "random"]),
            "admission": random.choice(["demand", "background", "demand" if ahead else "none"]),
            "admit_per_step": random.randint(1, 3),
            "predictor": predictor,
            "prefetch_depth": random.choice([1, 2]) if predictor == "gate" else 0,
            "prefetch_width": random.choice([None, 1, 3]),
            "miss_action": random.choice(["fetch", "cpu", "split"]),
            "split_rule": split_rule,
            "objective": random.choice(["makespan", "balance"]) if split_rule in ("makespan", "tau") else "makespan",
            "utility": random_utility(random),
        }
    )


def random_utility(random: Random) -> dict[str, Any]:
    """Any utility settings."""
    k = random.randint(1, 4)
    return {
        "k": k,
        "signal": random.choice(["delta", "level"]),
        "rate": random.choice([0.0, 0.1, 0.5, 1.0]),
        "adapt": random.choice(["real", "floored", "off"]),
        "theta_up": random.choice([None, 0.0, 2.0]),
        "theta_down": random.choice([None, 0.0, 2.0]),
        "tau": random.choice(["auto", random.randint(1, k + 1)]),
        "reset_done": random.random() < 0.5,
    }


def random_warm(random: Random, shape: ModelShape = SHAPE) -> np.ndarray:
    """Counts of some recording."""
    counts = [[random.randint(0, 4) for _ in range(shape.experts)] for _ in range(shape.n_moe_layers)]
    return np.asarray(counts, np.int64)


def random_capacity(random: Random, shape: ModelShape = SHAPE) -> tuple[int, ...]:
    return tuple(random.randint(0, shape.experts) for _ in range(shape.n_moe_layers))


class Driver:
    """One brain and the link that serves it; `log` holds every decision."""

    def __init__(
        self,
        settings: Settings,
        capacity: tuple[int, ...],
        random: Random,
        shape: ModelShape = SHAPE,
        costs: SplitCosts = COSTS,
    ) -> None:
        self.brain = Brain(shape, settings, capacity, costs, random_warm(random, shape))
        self.costs = costs
        self.shape, self.random = shape, random
        self.flying: deque[int] = deque()
        self.log: list[Any] = []

    # The link

    def issue(self, phase: int = DECODE) -> int:
        """Issue the next copy if the window allows; its key or -1."""
        could = self.brain.can_issue()
        key = self.brain.next_copy(phase)
        assert could == (key >= 0)
        if key >= 0:
            self.flying.append(key)
            self.log.append(("issue", key))
        assert len(self.flying) == self.brain.in_flight() <= WINDOW
        return key

    def land(self) -> None:
        """The oldest copy arrives."""
        if self.flying:
            self.brain.complete(self.flying.popleft())

    def link(self, phase: int = DECODE) -> None:
        """The link works for a while."""
        for _ in range(self.random.randrange(4)):
            if self.random.random() < 0.5:
                self.issue(phase)
            else:
                self.land()

    def drain(self, phase: int = DECODE) -> None:
        """The link works until nothing is queued or in flight."""
        while self.issue(phase) >= 0 or self.flying:
            self.land()

    def settle(self) -> None:
        """Nothing is queued, in flight or landed any more."""
        self.brain.quiesce()
        while self.flying:
            self.land()

    def status(self, layer: int, expert: int) -> int:
        return self.brain.status(layer, expert)

    def kept(self, layer: int) -> set[int]:
        """Experts in persistent slots."""
        return set(np.flatnonzero(self.brain.state.status[layer] == KEPT).tolist())

    # Decode

    def layer_step(self, layer: int, experts: list[int], counts: list[int] | None = None) -> list[Action]:
        """A layer-step of `experts`, ascending: demand, copies until all have landed, finish."""
        actions = self.begin(layer, experts, counts)
        self.wait(layer, experts, actions)
        self.finish(layer)
        return actions

    def begin(self, layer: int, experts: list[int], counts: list[int] | None = None) -> list[Action]:
        actions = [Action(a) for a in self.brain.begin(layer, int32(experts), int32(counts or [1] * len(experts)))]
        self.brain.check_integrity()
        self.log.append(("begin", layer, experts, [int(a) for a in actions]))
        return actions

    def wait(self, layer: int, experts: list[int], actions: list[Action]) -> None:
        """Serve the link until every expert waited for is usable; one by one, as an engine notices them."""
        wanted = [e for e, a in zip(experts, actions, strict=True) if a in (Action.LATE, Action.FETCH)]
        while any(self.status(layer, expert) != LANDED for expert in wanted):
            if self.issue() < 0:
                assert self.flying, "a demanded copy is neither queued nor in flight"
                self.land()

    def finish(self, layer: int) -> None:
        self.brain.finish(layer)
        self.brain.check_integrity()
        self.log.append(("kept", layer, sorted(self.kept(layer))))

    def step(self) -> None:
        """A whole decode step."""
        shape, random = self.shape, self.random
        for layer in range(shape.n_moe_layers):
            experts = sorted(random.sample(range(shape.experts), random.randint(1, shape.top_k)))
            actions = self.begin(layer, experts, [random.choice([1, 1, 2, 3]) for _ in experts])
            for ahead in range(1, self.brain.settings.prefetch_depth + 1):
                if layer + ahead < shape.n_moe_layers:
                    self.predict(layer + ahead)
            self.link()
            self.wait(layer, experts, actions)
            self.finish(layer)
            self.link()
        self.brain.end_step()

    def predict(self, layer: int) -> None:
        width = self.brain.settings.width(self.shape)
        predicted = self.random.sample(range(self.shape.experts), width)
        known = self.random.randint(0, width)
        predicted[known:] = [-1] * (width - known)
        self.brain.prefetch(layer, int32(predicted))
        self.brain.check_integrity()

    # Warm start and prompts

    def warm_start(self) -> set[tuple[int, int]]:
        """Load what the brain wants before the first request; returns it as (layer, expert)."""
        targets = np.argwhere(self.brain.warm_targets()).tolist()
        every = np.ones(self.shape.experts, np.bool_)
        for layer, expert in targets:
            assert self.brain.prefill_fetch(layer, expert)
            self.drain(WARM)
            self.brain.prefill_done(layer, expert, every)
            assert self.status(layer, expert) == KEPT
            self.brain.check_integrity()
        return {(layer, expert) for layer, expert in targets}

    def prompt(self, chunks: int = 2) -> None:
        """A request begins and its prompt is fed in chunks."""
        self.settle()
        self.brain.start_request()
        for chunk in range(chunks):
            for layer in range(self.shape.n_moe_layers):
                counts = [self.random.choice([0, 0, 1, 2, 5]) for _ in range(self.shape.experts)]
                self.prompt_layer(layer, counts, chunk == chunks - 1)

    def prompt_layer(self, layer: int, counts: list[int], last: bool) -> None:
        """One layer of a prompt chunk; the link serves in any order the window allows."""
        target = self.brain.prefill_targets(layer, int32(counts), last)
        todo = [e for e in range(self.shape.experts) if counts[e] and self.status(layer, e) != KEPT]
        waiting: list[int] = []
        while todo or waiting:
            while todo and self.brain.prefill_fetch(layer, todo[0]):
                waiting.append(todo.pop(0))
            assert waiting, "a prompt chunk cannot get any staging slot"
            while not (ready := [e for e in waiting if self.status(layer, e) == LANDED]):
                if self.issue(PREFILL) < 0:
                    self.land()
            expert = self.random.choice(ready)
            waiting.remove(expert)
            self.brain.prefill_done(layer, expert, target)
            self.brain.check_integrity()
        self.log.append(("prompt", layer, sorted(self.kept(layer))))

    # Settings

    def reconfigure(self, settings: Settings, capacity: tuple[int, ...]) -> None:
        """New settings, as `Engine.apply` pushes them; contents must follow the slots."""
        self.settle()
        before, contents = self.residents(), {slot: key for key, slot in self.residents().items()}
        slots = self.brain.slots
        for source, target in self.brain.reconfigure(settings, capacity, self.costs):
            assert 0 <= target < self.brain.slots <= source < slots
            contents[target] = contents[source]
        self.brain.check_integrity()
        after = self.residents()
        assert after.keys() <= before.keys()
        assert all(contents[slot] == key for key, slot in after.items())
        kept = [sum(1 for layer, _ in before if layer == at) for at in range(self.shape.n_moe_layers)]
        left = [len(self.kept(at)) for at in range(self.shape.n_moe_layers)]
        if settings.pool == "shared":
            assert sum(left) == min(sum(kept), sum(capacity))
        else:
            assert left == list(map(min, kept, capacity))
        self.log.append(("reconfigure", sorted(after.items())))

    def residents(self) -> dict[tuple[int, int], int]:
        """(layer, expert) -> slot of all that is on the device."""
        at = np.argwhere(self.brain.state.status != ABSENT).tolist()
        return {(layer, expert): self.brain.slot(layer, expert) for layer, expert in at}

    def anything(self) -> None:
        """One random thing that can happen between two steps."""
        random = self.random
        what = random.choices(
            ["step", "prompt", "reconfigure", "quiesce", "link", "drop", "warm"], [12, 2, 2, 1, 2, 1, 1]
        )[0]
        if what == "step":
            self.step()
        elif what == "prompt":
            self.prompt(random.randint(1, 3))
        elif what == "reconfigure":
            self.reconfigure(random_settings(random), random_capacity(random, self.shape))
        elif what == "quiesce":
            self.settle()
        elif what == "link":
            self.link()
        elif what == "warm":
            self.settle()
            self.warm_start()
        else:
            self.settle()
            self.brain.drop_cache()
        self.brain.check_integrity()


def digest(seed: int, actions: int) -> str:
    """A fingerprint of every decision and counter of a random run."""
    random = Random(seed)
    driver = Driver(random_settings(random), random_capacity(random), random)
    for _ in range(actions):
        driver.anything()
    text = repr((driver.log, driver.brain.counters.tolist()))
    return hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    for seed in range(4):
        print(digest(seed, 40))
