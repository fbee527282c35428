"""Formats with one record per token and layer: minimal JSON lines, CSV, Megatron's and moe-policylang's traces.

Records may be ordered by token or, as a prefill writes them, by layer. A token is passed on once all its layers are
there and all tokens before it are gone, so memory holds no more than the longest prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from foreload.traces.importers.base import UNKNOWN_TOKEN, Block, Source, problem_of
from foreload.traces.schema import PREFILL

MAX_OPEN = 1 << 17


@dataclass(frozen=True)
class Record:
    """The experts of one token in one layer."""

    request: int
    token: int
    layer: int
    experts: list[int]
    phase: int
    token_id: int = UNKNOWN_TOKEN


@dataclass
class _Open:
    phase: int
    token_id: int
    layers: dict[int, list[int]]


class Assembler:
    """Puts the layers of each token together; `where` in its calls is the record's line or row."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._numbers = source.shape.moe_layers
        self._known = frozenset(self._numbers)
        self._open: dict[tuple[int, int], _Open] = {}
        self._newest: dict[int, int] = {}  # request -> its newest token
        self._before: tuple[int, int] | None = None  # request and phase of the block before

    def add(self, where: str, record: Record) -> list[Block]:
        """Take a record; returns the rows that are complete now. FileError names `where`."""
        problem = problem_of(record.experts, self._source.shape)
        if record.layer not in self._known:
            problem = f"layer {record.layer} is no MoE layer: they are {_listed(self._numbers)}"
        if problem:
            raise self._source.error(where, problem)
        found = self._token(where, record)
        if record.layer in found.layers:
            raise self._source.error(where, f"token {record.token} has layer {record.layer} already")
        if (record.phase, record.token_id) != (found.phase, found.token_id):
            raise self._source.error(where, f"token {record.token} changes its phase or token id between layers")
        found.layers[record.layer] = record.experts
        return list(self._complete()) if len(found.layers) == len(self._numbers) else []

    def _token(self, where: str, record: Record) -> _Open:
        key = (record.request, record.token)
        found = self._open.get(key)
        if found is None:
            newest = self._newest.get(record.request, -1)
            if record.token <= newest:
                raise self._source.error(where, f"token {record.token} follows token {newest}: it is complete")
            if len(self._open) >= MAX_OPEN:
                raise self._source.error(where, f"{self._lacking()}, and {MAX_OPEN} tokens wait behind it")
            self._newest[record.request] = record.token
            found = self._open[key] = _Open(record.phase, record.token_id, {})
        return found

    def _complete(self) -> Iterator[Block]:
        run: list[tuple[tuple[int, int], _Open]] = []
        while self._open:
            key = next(iter(self._open))
            first = self._open[key]
            if len(first.layers) < len(self._numbers):
                break
            if run and (run[0][0][0], run[0][1].phase) != (key[0], first.phase):
                yield self._block(run)
                run = []
            run.append((key, self._open.pop(key)))
        if run:
            yield self._block(run)

    def _block(self, run: list[tuple[tuple[int, int], _Open]]) -> Block:
        request, phase = run[0][0][0], run[0][1].phase
        again = self._before == (request, phase) and phase == PREFILL
        self._before = (request, phase)
        return Block(
            request,
            phase,
            np.array([token for (_, token), _ in run], np.int64),
            np.array([[one.layers[layer] for layer in self._numbers] for _, one in run], np.int64),
            token_id=np.array([one.token_id for _, one in run], np.int64),
            same_step=again,
        )

    def finish(self, where: str) -> None:
        """FileError if a token lacks layers: the file is truncated. `where` names its last record."""
        if self._open:
            raise self._source.error(where, f"the file ends here, but {self._lacking()} (truncated?)")

    def _lacking(self) -> str:
        (request, token), first = next(iter(self._open.items()))
        missing = [number for number in self._numbers if number not in first.layers]
        held = f"{len(first.layers)} of {len(self._numbers)} layers"
        return f"token {token} of request {request} has {held}: layer {missing[0]} is missing"


def _listed(numbers: tuple[int, ...]) -> str:
    if numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")
