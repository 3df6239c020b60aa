"""Ranges of the numbers that users and processor files give; how a refused value is shown.

A range is finite on both sides, so that whatever is computed from a number inside it is finite too.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, TypeGuard

from qwen3vl_export.errors import InputError

__all__ = [
    "FPS_RANGE",
    "MAX_INTEGER",
    "MAX_SECONDS",
    "is_integer",
    "is_real",
    "positive_fps",
    "shown",
]

FPS_RANGE = (1e-6, 1e6)
"""Frames a second, recorded or sampled: from one in eleven days to one a microsecond."""

MAX_SECONDS = 1e12
"""Latest time of a frame; what a million frames at the lowest rate reach."""

MAX_INTEGER = 2**63 - 1

_MAX_SHOWN = 60


def is_integer(value: Any, low: int = 1, high: int = MAX_INTEGER) -> TypeGuard[int]:
    """Whether `value` is an integer (no bool) from `low` to `high`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high


def is_real(value: Any, low: float, high: float) -> TypeGuard[float]:
    """Whether `value` is a number (no bool, no NaN) from `low` to `high`."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        number = float(value)
    except OverflowError:
        return False
    return math.isfinite(number) and low <= number <= high


def positive_fps(value: object, name: str) -> float:
    """Return `value` as frames a second.

    Raises:
        InputError: It is not a number above zero, or outside `FPS_RANGE`; the message calls it
            `name`.
    """
    low, high = FPS_RANGE
    if not is_real(value, low, high):
        raise InputError(
            f"{name} must be a number above zero, found {shown(value)}; give frames a second, from "
            f"{low:g} to {high:g}"
        )
    return float(value)


def shown(value: Any) -> str:
    """`repr(value)`, cut where it is long, so that a message stays readable."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else "a value"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({type(value).__name__})"
