"""Following a request while it is generated, and ending it early."""

from __future__ import annotations

from torch import Tensor


class StopGeneration(Exception):  # noqa: N818 - no error: the request ends here and keeps what it has
    """Raised by a follower (or `on_token`) to end its request; `Engine.generate` then returns what there is."""


class Follower:
    """Told about one request as it goes on, by the decoding thread. Each method may raise `StopGeneration`."""

    prompt_logits = False
    """Whether `logits` is wanted for the prompt's positions too, which costs the output head over all of them."""

    def fed(self, tokens: int) -> None:
        """Another chunk of `tokens` prompt tokens has been fed."""

    def logits(self, rows: Tensor) -> None:
        """Logits [n, vocab] of the next n tokens, in order of position: of the prompt's second token and later if
        `prompt_logits`, then of each generated token before it is given to `token`."""

    def token(self, token: int) -> None:
        """A token has been chosen."""
