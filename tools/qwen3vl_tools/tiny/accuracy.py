"""Exact-match accuracy of anything that answers a `Sample`, whatever engine is behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from qwen3vl_tools.tiny.scenes import KINDS, Sample, held_out

__all__ = ["accuracy", "held_out_all"]


def accuracy(
    answer: Callable[[Sample], str], samples: Iterable[Sample]
) -> dict[str, tuple[int, int]]:
    """Asks every sample; gives (right, total) for each kind, in the order the kinds appear."""
    counts: dict[str, tuple[int, int]] = {}
    for sample in samples:
        right, total = counts.get(sample.kind, (0, 0))
        is_right = answer(sample).strip() == sample.answer
        counts[sample.kind] = (right + is_right, total + 1)
    return counts


def held_out_all(count: int, seed: int) -> list[Sample]:
    """`count` held-out samples of every kind."""
    return [sample for kind in KINDS for sample in held_out(kind, count, seed)]
