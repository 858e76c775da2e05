"""Drafts from a request's own tokens: what followed the last time its last few tokens came up."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .tokens import StepTokens

NGRAM = 3  # tokens that must have come up before


@dataclass
class _History:
    """tokens of a request, and where each run of NGRAM of them was last followed by another."""

    tokens: array
    after: dict[tuple[int, ...], int] = field(default_factory=dict)

    def extend(self, new: list[int]) -> None:
        first = max(len(self.tokens), NGRAM)
        self.tokens.extend(new)
        tokens, after = self.tokens, self.after
        for at in range(first, len(tokens)):
            after[tuple(tokens[at - NGRAM : at])] = at

    def propose(self, count: int) -> array:
        """Up to `count` tokens that followed the last NGRAM tokens when they came up before."""
        at = self.after.get(tuple(self.tokens[-NGRAM:]))
        return array("i") if at is None else self.tokens[at : at + count]


@dataclass
class NgramDrafts:
    """width: most drafts of a step. Requests are named by their row in the run."""

    width: int
    histories: dict[int, _History] = field(default_factory=dict)

    def after(
        self,
        requests: np.ndarray,
        speaks: np.ndarray,
        prompts: list[Callable[[], np.ndarray]],
        step: StepTokens,
        drafts: np.ndarray,
    ) -> np.ndarray:
        """Drafts of each sequence's next step, int32 [num_seqs, width], then -1.

        speaks   bool [num_seqs]: sequences that have a next token
        prompts  functions that make the tokens of a request that has none here yet
        step     what was accepted and what comes next
        drafts   int [num_seqs, >= accepted]: the drafts that were tried
        """
        found = np.full((len(requests), self.width), -1, np.int32)
        for i in np.flatnonzero(speaks).tolist():
            row = int(requests[i])
            history = self.histories.get(row)
            if history is None:
                history = self.histories[row] = _History(array("i"))
                history.extend(prompts[i]().tolist())
            kept = int(step.accepted[i])
            history.extend([*drafts[i, :kept].tolist(), int(step.next_tokens[i])])
            proposed = history.propose(self.width)
            found[i, : len(proposed)] = proposed
        return found

    def forget(self, requests: Any) -> None:
        """Drops requests that ended."""
        for row in requests.tolist():
            self.histories.pop(row, None)
