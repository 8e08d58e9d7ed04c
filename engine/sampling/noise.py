"""The randomness of sampling: a pure function of (seed, choice, position). Nothing else in the engine is random.

Therefore a token does not depend on other requests, and a replayed request continues with the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd


def uniform(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits, for the tokens at `positions` of outputs (0 is the first).

    Each is output number `position` of the SplitMix64 generator (Steele, Lea and Flood, OOPSLA 2014) whose state begins
    at a hash of seed (0 .. 2**64 - 1) and choice. The numbers are the same on every machine and in every version.
    """
    one = np.uint64(1)
    starts = _mix(_mix(np.array(seeds, np.uint64) + _GAMMA) + (np.array(choices, np.uint64) + one) * _GAMMA)
    bits = _mix(starts + (np.array(positions, np.uint64) + one) * _GAMMA) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mix(bits: _Words) -> _Words:
    """SplitMix64's finaliser: a bijection of 64-bit numbers in which every input bit affects every output bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
