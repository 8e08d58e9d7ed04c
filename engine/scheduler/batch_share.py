"""The share of a step that requests of batches, which have the lowest priority, get while other requests run."""

from __future__ import annotations


class BatchShare:
    """One token for every TOKENS_OF_OTHERS tokens of other requests: batches make progress and barely slow the others.

    Decided by counts of tokens alone, so that results and their order do not depend on time.
    """

    TOKENS_OF_OTHERS = 8
    MOST = 16  # limit on saved tokens, so that no single step grows much

    def __init__(self, most: int = MOST) -> None:
        """most: limit on saved tokens; more than MOST only if a prompt must be computed in one step."""
        self._most = most
        self._earned = 0  # in tokens of others

    @property
    def num_tokens(self) -> int:
        """Tokens of batches that the next step may compute."""
        return self._earned // self.TOKENS_OF_OTHERS

    def add(self, num_others: int) -> None:
        """Count the tokens of other requests in a step."""
        self._earned = min(self._earned + num_others, self._most * self.TOKENS_OF_OTHERS)

    def spend(self, num_tokens: int) -> None:
        self._earned = max(0, self._earned - num_tokens * self.TOKENS_OF_OTHERS)

    def clear(self) -> None:
        """Reset the saved tokens, because no other request is left."""
        self._earned = 0
