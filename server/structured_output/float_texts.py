"""How llguidance reads the numbers of a schema; it may round floats a second time."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

_MAX_ULPS = 8  # distance within which to look for another float
_MAX_POWER = 308
_MAX_COEFFICIENT = 2**32 - 1


def to_decimal(value: float) -> Decimal:
    """Return the shortest decimal that reads as this float, which is what a schema means."""
    return Decimal(repr(value))


def count_places(value: Fraction) -> int:
    """Count the decimal places of a finite decimal."""
    count = 0
    while value.denominator > 1:
        value *= 10
        count += 1
    return count


def is_read_exactly(value: float) -> bool:
    """Whether llguidance reads the shortest text of a float as that float."""
    return _read(value) == value


def find_divisor(value: float) -> float | None:
    """Return the float from which llguidance derives the divisor `value`; None if none is known.

    It uses a 32-bit integer and a power of ten, by multiplications that may round.
    """
    wanted = Fraction(to_decimal(value))
    above = below = value
    for _ in range(_MAX_ULPS):
        for candidate in (above, below):
            if is_read_exactly(candidate) and _read_divisor(candidate) == wanted:
                return candidate
        above = math.nextafter(above, math.inf)
        below = math.nextafter(below, -math.inf)
    return None


def _read(value: float) -> float:
    """Return the digits as an integer, multiplied or divided by a power of ten."""
    sign, digits, exponent = to_decimal(value).as_tuple()
    assert isinstance(exponent, int)
    result = float(int("".join(map(str, digits))))
    while exponent < -_MAX_POWER:
        result /= float(f"1e{_MAX_POWER}")
        exponent += _MAX_POWER
    power = float(f"1e{abs(exponent)}")
    result = result * power if exponent >= 0 else result / power
    return -result if sign else result


def _read_divisor(value: float) -> Fraction | None:
    exponent = 0
    while value != math.floor(value):
        value *= 10.0
        exponent += 1
        if value > _MAX_COEFFICIENT:
            return None
    return Fraction(int(value), 10**exponent) if value <= _MAX_COEFFICIENT else None
