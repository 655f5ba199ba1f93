"""Statistics of measurements. Pure."""

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the percentile, interpolated between the two nearest values; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the quotient, to three digits; None where either is missing or zero."""
    return round(numerator / denominator, 3) if numerator and denominator else None


def median(values: Sequence[float]) -> float | None:
    return rounded(percentile(values, 50))


def spread(values: Sequence[float]) -> float | None:
    """Return the interquartile range; None for fewer than four values."""
    low, high = percentile(values, 25), percentile(values, 75)
    return None if len(values) < 4 or low is None or high is None else round(high - low, 2)
