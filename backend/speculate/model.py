"""`model`: a small dense model of the same tokenizer proposes tokens; it stays on the device with its own KV cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.models.decoder import Decoder
from foreload.backend.sampling import Sampler
from foreload.backend.speculate.base import Drafter, Proposal
from foreload.budget import fixed_bytes
from foreload.errors import MismatchError, UsageError

CHUNK_TOKENS = 256


def open_draft(model: str, target: Checkpoint, context_tokens: int) -> Checkpoint:
    """The configuration of a draft model for `target`; nothing is loaded.

    Raises MismatchError if its tokenizer is another one, UsageError if it cannot hold the context, FileError if it is
    no dense model that can be run.
    """
    draft = Checkpoint.open_dense(model)
    if draft.tokenizer_hash != target.tokenizer_hash and not _same_tokens(draft, target):
        raise MismatchError(
            f"draft model {draft.name!r}: its tokenizer ({draft.tokenizer_hash}) is not that of "
            f"{target.name!r} ({target.tokenizer_hash})"
        )
    if draft.shape.max_positions < context_tokens:
        raise UsageError(
            f"draft model {draft.name!r}: holds {draft.shape.max_positions} positions, context_tokens is "
            f"{context_tokens}"
        )
    return draft


def _same_tokens(draft: Checkpoint, target: Checkpoint) -> bool:
    """Whether both files give every token the same number, whatever else differs in them."""
    return target.folder is not None and draft.tokenizer().vocabulary == target.tokenizer().vocabulary


def draft_bytes(draft: Checkpoint, dtype: str, context_tokens: int) -> int:
    """Device bytes of a draft model: weights, and keys and values of the whole context."""
    return fixed_bytes(draft.shape, dtype, context_tokens)


class ModelDrafter(Drafter):
    """Greedy drafts for greedy text; else tokens drawn from the draft's own distribution at the same temperature.

    Keys and values of rejected drafts are rolled back by lowering the length, as in the target.
    """

    def __init__(self, draft: Checkpoint, device: torch.device, dtype: torch.dtype, context: int, vocab: int) -> None:
        """`vocab` is the target's: tokens beyond it are never proposed."""
        self.decoder = Decoder(draft, device, dtype, context)
        self._device, self._vocab = device, vocab
        self._fed: list[int] = []  # tokens whose keys and values are kept
        self._kept = 0  # how many of them are known to be of the text

    def start(self, text: list[int]) -> None:
        """Feed the text but its last token."""
        self._fed, self._kept = [], 0
        for at in range(0, len(text) - 1, CHUNK_TOKENS):
            chunk = text[at : min(at + CHUNK_TOKENS, len(text) - 1)]
            self._hidden(torch.tensor(chunk, device=self._device), at)
            self._fed += chunk
        self._kept = len(self._fed)

    def propose(self, text: list[int], gamma: int, sampler: Sampler) -> Proposal:
        """`gamma` tokens after the text."""
        while self._kept < min(len(self._fed), len(text) - 1) and self._fed[self._kept] == text[self._kept]:
            self._kept += 1
        at = self._kept
        logits = self._logits(torch.tensor(text[at:], device=self._device), at)
        chosen: list[Tensor] = []
        distributions: list[Tensor] = []
        for n in range(gamma):
            if n:
                logits = self._logits(chosen[-1], len(text) - 1 + n)
            if sampler.greedy:
                chosen.append(logits.argmax(-1, keepdim=True))
            else:
                distributions.append(sampler.distribution(logits))
                chosen.append(torch.tensor([sampler.choose(distributions[-1])], device=self._device))
        tokens: list[int] = torch.cat(chosen).tolist()
        self._fed = [*text, *tokens[:-1]]
        return Proposal(tokens, torch.stack(distributions) if distributions else None)

    def _hidden(self, ids: Tensor, position: int) -> Tensor:
        return self.decoder.finish(self.decoder.embed(ids), position)

    def _logits(self, ids: Tensor, position: int) -> Tensor:
        """Logits [target's vocab] after feeding ids [n] at `position`; tokens that the draft lacks are impossible."""
        logits = self.decoder.logits(self._hidden(ids, position)[-1])[: self._vocab]
        return F.pad(logits, (0, self._vocab - len(logits)), value=float("-inf"))
