"""The randomness of sampling: a pure function of (seed, choice, position). Nothing else in the engine is random.

So a token does not depend on other requests, and a replayed request continues with the same tokens.
"""

from __future__ import annotations

_GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
_MASK = 2**64 - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, for the token at `position` of the output (0 is the first).

    This is output number `position` of the SplitMix64 generator (Steele, Lea and Flood, OOPSLA 2014) whose state begins
    at a hash of seed (0 .. 2**64 - 1) and choice. The same on every machine and in every version.
    """
    start = _mix(_mix(seed + _GAMMA) + (choice + 1) * _GAMMA)
    return (_mix(start + (position + 1) * _GAMMA) >> 11) * 2.0**-53


def _mix(bits: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit numbers in which every input bit affects every output bit."""
    bits &= _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)
