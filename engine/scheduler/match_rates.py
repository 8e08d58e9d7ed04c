"""How often guesses from texts come true, by the length of the match that they follow."""

from __future__ import annotations

LONGEST = 16  # longer matches count as this one


class MatchRates:
    """Learns from all guesses and weighs recent ones most. After k right guesses from the same match, the next guess
    counts as if the match were k ids longer."""

    MEMORY = 0.99  # weight of a guess in comparison with the next one
    FIRST_WEIGHT = 8.0  # guesses that the first rates count as
    FIRST_RATE = 0.5  # share of right guesses after the shortest matches
    FIRST_SLOPE = 0.03  # by which the first rates grow with each id of a match

    def __init__(self) -> None:
        self._weights = [self.FIRST_WEIGHT] * (LONGEST + 1)  # by length
        self._right = [
            self.FIRST_WEIGHT * (self.FIRST_RATE + self.FIRST_SLOPE * max(0, length - 3))
            for length in range(LONGEST + 1)
        ]
        self._rates = [right / self.FIRST_WEIGHT for right in self._right]

    def find_rate(self, length: int) -> float:
        """The share of guesses after matches of `length` ids that come true."""
        return self._rates[min(length, LONGEST)]

    def observe(self, length: int, came_true: bool) -> None:
        length = min(length, LONGEST)
        self._weights[length] = self.MEMORY * self._weights[length] + 1.0
        self._right[length] = self.MEMORY * self._right[length] + came_true
        self._rates[length] = self._right[length] / self._weights[length]
