"""Captured pieces: the graphs that a decode step of n rows launches, layer by layer or as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from foreload.backend.cuda.issue import Issuer
from foreload.backend.cuda.kernels.layout import BlockLayout
from foreload.backend.cuda.pieces import Pieces
from foreload.backend.models.attention import GroupedAttention, LatentAttention
from foreload.backend.models.decoder import Decoder

Piece = Callable[[], None]


class Capture(Protocol):
    """Turns pieces into executable graphs."""

    def __call__(self, piece: Piece) -> int:
        """An executable graph of a piece that has run before."""

    def drop(self, executable: int) -> None:
        """Give one up."""


class GraphCapture:
    """CUDA graphs of one memory pool; they run one after the other on one stream."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # the default stream cannot be captured
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}  # they hold what their nodes use

    def __call__(self, piece: Piece) -> int:
        """See `Capture`. Other threads may query events meanwhile."""
        if not self._graphs:  # the last graph of a pool takes it along
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                piece()
            finally:
                graph.capture_end()
        executable = self._issuer.instantiate(graph.raw_cuda_graph())
        self._graphs[executable] = graph
        return executable

    def drop(self, executable: int) -> None:
        """See `Capture`."""
        self._issuer.drop_graph(executable)
        del self._graphs[executable]


@dataclass(frozen=True)
class Program:
    """Executable graphs of a step of n rows.

    `enter[at]` brings a step into MoE layer `at` (0: from the token ids; else from the experts of the layer before) and
    up to its routing; the last entry gives the logits. `planned[at]` runs the host's plan of resident experts of layer
    `at`; where the program is `joined`, `enter[at]` waits for that plan and runs it itself. `whole`: a step whose
    experts are all resident.
    """

    pieces: Pieces
    enter: tuple[int, ...]
    planned: tuple[int, ...]
    whole: int

    @property
    def joined(self) -> bool:
        """Whether what enters a layer also runs its resident experts."""
        return not self.pieces.behaviour.watched

    def executables(self) -> tuple[int, ...]:
        """All graphs."""
        return (*self.enter, *dict.fromkeys(self.planned), self.whole)


def make_program(pieces: Pieces, addresses: Tensor, decoder: Decoder, capture: Capture) -> Program:
    """Run every piece once, so that kernels are compiled, then capture; keys and values stay as they were.

    addresses int64 [layers, experts]: where resident experts are, when `whole` is launched.
    """
    layers, cpu = pieces.shape.n_moe_layers, pieces.behaviour.cpu

    def arrive(at: int) -> None:
        pieces.attend(at)
        if not pieces.behaviour.watched:
            pieces.planned(pieces.layouts[at], at)

    def first() -> None:
        pieces.begin()
        arrive(0)

    def into(at: int) -> Piece:
        def run() -> None:
            pieces.combine(at - 1, cpu)
            if at < layers:
                arrive(at)
            else:
                pieces.head()

        return run

    def whole() -> None:
        pieces.begin()
        for at in range(layers):
            pieces.attend(at, whole=True)
            pieces.resident(at, addresses)
            pieces.combine(at, False)
        pieces.head()

    planned: dict[BlockLayout, Piece] = {layout: partial(pieces.planned, layout) for layout in pieces.layouts}
    enter: list[Piece] = [first, *(into(at) for at in range(1, layers + 1))]
    addresses.zero_()  # experts at address 0 are left out
    pieces.host.given.zero_()
    pieces.host.release(layers - 1)  # of step 0, too
    with kept(decoder, pieces.rows):
        for piece in (*enter, *planned.values(), whole):
            piece()
    entered, captured = tuple(map(capture, enter)), {layout: capture(piece) for layout, piece in planned.items()}
    return Program(pieces, entered, tuple(captured[layout] for layout in pieces.layouts), capture(whole))


def make_waves(pieces: Pieces, capture: Capture) -> dict[BlockLayout, tuple[int, ...]]:
    """Per layout of blocks, one graph per late expert of a layer-step, for steps of up to `pieces.rows` rows."""
    pieces.m.waves.zero_()
    found = {}
    for layout in dict.fromkeys(pieces.layouts):
        pieces.wave(0, layout)
        found[layout] = tuple(capture(partial(pieces.wave, number, layout)) for number in range(pieces.items))
    return found


class kept:  # noqa: N801 - used like a function
    """While the block runs, the keys and values of the first `rows` positions may be overwritten."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        self._parts: list[Tensor] = []
        blocks = [block for layer in decoder.layers for block in (*layer.before, layer)] + list(decoder.after)
        for block in blocks:
            attention = block.attention
            if isinstance(attention, GroupedAttention):
                self._parts += [attention.keys[:, :rows], attention.values[:, :rows]]
            elif isinstance(attention, LatentAttention):
                self._parts.append(attention.rows[:rows])

    def __enter__(self) -> None:
        self._saved = [part.clone() for part in self._parts]

    def __exit__(self, *_: object) -> None:
        for part, saved in zip(self._parts, self._saved, strict=True):
            part.copy_(saved)
