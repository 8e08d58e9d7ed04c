"""How often drafts from texts are accepted, by the length of the match that they follow."""

from __future__ import annotations

LONGEST = 16  # longer matches count as this one


class AcceptanceRates:
    """Learns from all drafts, giving recent ones more weight. After k accepted drafts from the same match, the next one
    counts as if the match were k ids longer."""

    MEMORY = 0.99  # weight of a draft relative to the next one
    FIRST_WEIGHT = 8.0  # number of drafts that the initial rates count as
    FIRST_RATE = 0.5  # initial acceptance rate after the shortest matches
    FIRST_SLOPE = 0.03  # increase of the initial rates with each id of a match

    def __init__(self) -> None:
        self._weights = [self.FIRST_WEIGHT] * (LONGEST + 1)  # by length
        self._right = [
            self.FIRST_WEIGHT * (self.FIRST_RATE + self.FIRST_SLOPE * max(0, length - 3))
            for length in range(LONGEST + 1)
        ]
        self._rates = [right / self.FIRST_WEIGHT for right in self._right]

    def find_rate(self, length: int) -> float:
        """Return the acceptance rate of drafts after matches of `length` ids."""
        return self._rates[min(length, LONGEST)]

    def find_later_rate(self, length: int, index: int) -> float:
        """Return the acceptance rate of the draft after `index` accepted ones from the same match."""
        return self.find_rate(length + index)

    def observe(self, length: int, was_right: bool) -> None:
        length = min(length, LONGEST)
        self._weights[length] = self.MEMORY * self._weights[length] + 1.0
        self._right[length] = self.MEMORY * self._right[length] + was_right
        self._rates[length] = self._right[length] / self._weights[length]
