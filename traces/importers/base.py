"""What every importer gives: blocks of rows, checked row by row, and errors that say where.

n = rows of a block, L = MoE layers, k = experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreload.errors import FileError
from foreload.shape import ModelShape
from foreload.traces.schema import PHASES

UNKNOWN_TOKEN = -1
LIMIT = 1 << 31


@dataclass(frozen=True)
class Source:
    """A file to import and the model that it is about; importers add to `notes` what a reader should know."""

    path: Path
    shape: ModelShape
    notes: list[str] = field(default_factory=list)

    def error(self, where: str, problem: str) -> FileError:
        """The error that names the file, the place in it and the problem."""
        return FileError(f"{self.path}: {where}: {problem}" if where else f"{self.path}: {problem}")

    def note(self, text: str) -> None:
        """Say `text` once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True)
class Block:
    """Rows of one request and phase that follow each other.

    Prefill rows are one step, which goes on with the step of the block before if `same_step`; every decode row is a
    step of its own. For errors, `where` names the place in the source and `rows` the rows' numbers there (from 0).
    """

    request: int
    phase: int
    position: NDArray[np.int64]  # [n]
    experts: NDArray[np.int64]  # [n, L, k] in rank order
    where: str = ""
    rows: NDArray[np.int64] | None = None  # [n]
    token_id: NDArray[np.int64] | None = None  # [n]
    weights: NDArray[np.float32] | None = None  # [n, L, k]
    same_step: bool = False

    def row(self, index: int) -> int:
        """The number in the source of the block's row `index`."""
        return index if self.rows is None else int(self.rows[index])


@dataclass(frozen=True)
class Blocks:
    """A recording to be: its rows in time order, read as they are asked for."""

    rows: Iterator[Block]
    has_weights: bool = False


@dataclass(frozen=True)
class Counts:
    """How often each expert was used, without order: [L, experts]."""

    counts: NDArray[np.int64]


Importer = Callable[[Source], Blocks | Counts]


def problem_of(ids: Sequence[int], shape: ModelShape) -> str | None:
    """What is wrong with the experts of one token in one layer, or None."""
    if len(ids) != shape.top_k:
        return f"{len(ids)} experts: the model takes {shape.top_k}"
    for expert in ids:
        if not 0 <= expert < shape.experts:
            return f"expert {expert} is outside 0 to {shape.experts - 1}"
    if len(set(ids)) < len(ids):
        return f"expert {next(e for e in ids if ids.count(e) > 1)} is there twice"
    return None


def check_block(source: Source, block: Block) -> None:
    """FileError naming the first row with an expert that is unknown or there twice, or a number that does not fit."""
    shape = source.shape
    n = len(block.position)
    if block.experts.shape != (n, shape.n_moe_layers, shape.top_k):
        found = " x ".join(map(str, block.experts.shape))
        wanted = f"{n} x {shape.n_moe_layers} x {shape.top_k}"
        raise source.error(block.where, f"experts are {found}: rows x MoE layers x top-k are {wanted}")
    ordered = np.sort(block.experts, axis=2)
    bad = (ordered[:, :, 0] < 0) | (ordered[:, :, -1] >= shape.experts)
    bad |= (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
    if bad.any():
        row, index = np.argwhere(bad)[0]
        problem = problem_of(block.experts[row, index].tolist(), shape)
        raise source.error(block.where, f"row {block.row(row)}, layer {shape.moe_layers[index]}: {problem}")
    for name, values, lowest in (("position", block.position, 0), ("token id", block.token_id, UNKNOWN_TOKEN)):
        if values is not None and n and not lowest <= values.min() <= values.max() < LIMIT:
            row = int(np.argmax((values < lowest) | (values >= LIMIT)))
            raise source.error(block.where, f"row {block.row(row)}: {name} {values[row]} does not fit")


def whole(source: Source, where: str, name: str, value: Any, lowest: int = 0) -> int:
    """`value` as a whole number of at least `lowest` that fits int32; FileError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not lowest <= value < LIMIT:
        raise source.error(where, f"{name} is {_shown(value)}: a whole number from {lowest} to {LIMIT - 1} is needed")
    return int(value)


def mapping(source: Source, where: str, value: Any) -> dict[str, Any]:
    """`value` as an object with named fields; FileError otherwise."""
    if not isinstance(value, dict):
        raise source.error(where, f"an object is needed, got {_shown(value)}")
    return value


def id_list(source: Source, where: str, name: str, value: Any) -> list[int]:
    """`value` as a list of whole numbers that fit int32; FileError otherwise."""
    listed = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(listed, list) or any(type(one) is not int or not -LIMIT <= one < LIMIT for one in listed):
        raise source.error(where, f"{name} is {_shown(value)}: a list of whole numbers is needed")
    return listed


def phase_code(source: Source, where: str, value: Any) -> int:
    """The code of a phase's name; FileError lists the names."""
    if value not in PHASES[:2]:
        raise source.error(where, f"phase is {_shown(value)}: phases are {', '.join(PHASES[:2])}")
    return PHASES.index(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
