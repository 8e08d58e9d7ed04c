"""The cost of drafts, learned from the times of steps, and whether they have paid off recently."""

from __future__ import annotations


class _RecentLine:
    """A straight line through recent points, close to their median: the distance of an outlier is limited, because
    another process on the machine may delay a step."""

    MAX_DEVIATIONS = 2.0  # distance limit, as a multiple of the mean distance
    DEVIATION_WEIGHT = 0.05  # weight of the latest point in the mean distance
    MIN_DEVIATION = 0.05  # share of the scale
    MIN_VARIANCE = 0.1  # least variance of x for which there is a slope

    def __init__(self, memory: float) -> None:
        """memory: weight of a point relative to the next one."""
        self._memory = memory
        self.num_points = 0
        self.mean_x = 0.0
        self.mean_y = 0.0
        self._weight = 0.0
        self._variance = 0.0
        self._covariance = 0.0
        self._deviation = 0.0  # recent mean distance of points

    def observe(self, x: float, y: float, scale: float) -> None:
        """scale: the order of magnitude of y."""
        if self.num_points:
            distance = y - self.predict(x)
            most = self.MAX_DEVIATIONS * max(self._deviation, self.MIN_DEVIATION * scale)
            y -= distance - max(-most, min(most, distance))
            # Far points widen the limit, so that the line follows when times change for good.
            self._deviation += self.DEVIATION_WEIGHT * (min(abs(distance), 3 * most) - self._deviation)
        else:
            self._deviation = scale
        self.num_points += 1
        self._weight = self._memory * self._weight + 1.0
        share = 1.0 / self._weight
        from_x = x - self.mean_x
        from_y = y - self.mean_y
        self.mean_x += share * from_x
        self.mean_y += share * from_y
        self._variance += share * (from_x * (x - self.mean_x) - self._variance)
        self._covariance += share * (from_x * (y - self.mean_y) - self._covariance)

    def fade(self, share: float) -> None:
        """Move the line towards 0, and give the next points more weight."""
        self.mean_y -= share * self.mean_y
        self._covariance -= share * self._covariance
        self._weight -= share * self._weight

    @property
    def slope(self) -> float | None:
        """None until points of different x have been seen."""
        return self._covariance / self._variance if self._variance >= self.MIN_VARIANCE else None

    def predict(self, x: float) -> float:
        return self.mean_y + (self.slope or 0.0) * (x - self.mean_x)


class StepCosts:
    """Estimates the time of a decode step without drafts, the fixed extra time of one with drafts, and that of each
    draft.

    Steps with drafts are compared with the latest ones without, because other work on the machine may slow all of them.
    Costs are shares of the cost of an id in a step without drafts.
    """

    UNKNOWN = 0.2  # cost of a draft until it is known
    FEW = 4  # number of steps of a kind after which their times are trusted
    COMPARE_AFTER = 32  # number of consecutive steps with drafts after which one without is due
    MAX_FIXED = 0.25  # share of a step; larger costs are measurement errors, or lead to a pause
    MAX_LONGER = 1.0  # share of a step; longer delays have other causes
    FORGET = 0.005  # share of these costs dropped after a step without drafts: errors must not prevent drafts forever

    def __init__(self) -> None:
        self._plain = _RecentLine(0.9)  # seconds of steps without drafts; flat
        self._excess = _RecentLine(0.95)  # number of drafts -> extra time of a step, as a share
        self._num_since_plain = 0
        self._fixed_share = 0.0  # extra time of a step with drafts, whatever their number, as a share
        self._draft_share: float | None = None  # extra time per draft; None until it is known

    def observe(self, num_sequences: int, num_drafts: int, seconds: float) -> float:
        """Record a step with this many newest ids and drafts. Returns the cost of its drafts as a share of a step."""
        if not num_drafts:
            self._num_since_plain = 0
            self._plain.observe(0, seconds, self._plain.mean_y or seconds)
            self._excess.fade(self.FORGET)
            self._split_excess(num_sequences)
            return 0.0
        self._num_since_plain += 1
        expected = self.find_step_seconds()
        if expected <= 0.0:
            return 0.0
        excess = seconds / expected - 1.0
        self._excess.observe(num_drafts, excess, 1.0)
        self._split_excess(num_sequences)
        return min(self.MAX_LONGER, excess)

    @property
    def is_comparison_due(self) -> bool:
        """Whether the next step should have no drafts, because their cost can only be found by comparison."""
        return self._num_since_plain >= self.COMPARE_AFTER

    def find_step_seconds(self) -> float:
        """Return the seconds of a step without drafts; 0 until they are known."""
        return self._plain.mean_y if self._plain.num_points >= self.FEW else 0.0

    def find_draft_cost(self, num_sequences: int) -> float:
        """Return the cost of one more draft, 0 to 1."""
        return self.UNKNOWN if self._draft_share is None else min(1.0, self._draft_share * num_sequences)

    def find_fixed_cost(self, num_sequences: int) -> float:
        """Return the cost of a step with drafts apart from that of each draft."""
        return min(self.MAX_FIXED, self._fixed_share) * num_sequences

    def _split_excess(self, num_sequences: int) -> None:
        """Divide the mean extra time into a fixed part and one per draft, neither of them negative."""
        line = self._excess
        if line.num_points < self.FEW:
            return
        mean = max(0.0, line.mean_y)
        each = self.UNKNOWN / num_sequences if line.slope is None else line.slope
        self._draft_share = max(0.0, min(mean / line.mean_x, each))
        self._fixed_share = mean - self._draft_share * line.mean_x


class DraftPause:
    """Stops lookups and drafts for a while when they have not paid off, longer each time, and then tries again."""

    MEMORY = 0.97  # weight of a step relative to the next one
    MIN_GAIN = 0.03  # share of a step: sequences without drafts must not be delayed by less
    FREE = 0.005  # share of a step that drafts may cost regardless of their savings
    TRIAL = 8  # steps with drafts after which they are judged
    LONGEST_TRIAL = 64  # steps after which they are judged in any case
    SHORTEST = 16  # steps that show whether steps have become slower for another reason
    LONGEST = 512
    GROWTH = 4

    def __init__(self) -> None:
        self._length = self.SHORTEST  # the next pause in steps
        self._num_left = 0  # steps of this pause
        self._start_trial()

    def _start_trial(self) -> None:
        self._num_steps = 0
        self._num_drafted = 0  # steps with drafts
        self._weight = 0.0
        self._saved = 0.0
        self._cost = 0.0

    @property
    def is_on(self) -> bool:
        return self._num_left > 0

    def skip_step(self) -> bool:
        """Count a step of a long pause. Returns False if the step must be measured: outside pauses, and before their
        end, so that times of steps without drafts are recent then."""
        if self._num_left <= self.SHORTEST:
            return False
        self._num_left -= 1
        return True

    def observe(self, saved: float, cost: float, has_drafts: bool) -> None:
        """Record a step. saved, cost: time that drafts and lookups saved and took, as shares of a plain step."""
        if self._num_left:
            self._num_left -= 1
            return
        self._num_steps += 1
        self._num_drafted += has_drafts
        self._weight = self.MEMORY * self._weight + 1.0
        self._saved = self.MEMORY * self._saved + saved
        self._cost = self.MEMORY * self._cost + cost
        if self._num_drafted < self.TRIAL and self._num_steps < self.LONGEST_TRIAL:
            return
        if self._cost > self.FREE * self._weight and self._saved - self._cost < self.MIN_GAIN * self._weight:
            self._num_left = self._length
            self._length = min(self.LONGEST, self.GROWTH * self._length)
            self._start_trial()
        elif self._num_steps >= self.LONGEST_TRIAL:
            self._length = self.SHORTEST
