"""The share of a step that requests of the Batch API, which have the lowest priority, get while other requests run."""

from __future__ import annotations


class BatchApiShare:
    """One token per TOKENS_OF_OTHERS tokens of other requests: batches make progress and barely slow the others.

    A step that computes prompts of others, or ids that a grammar forces, gets no tokens of batches, because clients
    wait for the ids that follow: the tokens are saved for later steps. After MAX_SKIPPED such steps in a row, the next
    one gets them anyway. Counts of tokens decide, not clocks, so that results and their order do not depend on time.
    """

    TOKENS_OF_OTHERS = 8
    MAX_SAVED = 16  # tokens, so that no single step grows much
    MAX_SKIPPED = 8  # steps in a row

    def __init__(self, max_saved: int = MAX_SAVED) -> None:
        """max_saved: limit on saved tokens; more than MAX_SAVED only if a prompt must be computed in one step."""
        self._max_saved = max_saved
        self._earned = 0  # in tokens of others
        self._num_skipped = 0  # latest steps without tokens of batches

    @property
    def num_tokens(self) -> int:
        """Tokens of batches that the step may compute."""
        return 0 if self._num_skipped else self._earned // self.TOKENS_OF_OTHERS

    def add(self, num_others: int, is_decode: bool) -> None:
        """Count the tokens of other requests in a step. is_decode: whether an id is sampled after each."""
        is_skipped = not is_decode and self._num_skipped < self.MAX_SKIPPED
        self._num_skipped = self._num_skipped + 1 if is_skipped else 0
        self._earned = min(self._earned + num_others, self._max_saved * self.TOKENS_OF_OTHERS)

    def spend(self, num_tokens: int) -> None:
        self._earned = max(0, self._earned - num_tokens * self.TOKENS_OF_OTHERS)

    def clear(self) -> None:
        """Reset the saved tokens, because no other request is left."""
        self._earned = 0
        self._num_skipped = 0
