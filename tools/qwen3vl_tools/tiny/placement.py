"""Chooses sizes and free places for shapes."""

from __future__ import annotations

import numpy as np

from qwen3vl_tools.tiny.drawing import COLORS, SHAPES, Thing, shape_thing

__all__ = ["MIN_GAP", "place", "place_any", "random_side"]

MIN_GAP = 12.0  # pixels between centres below which "left of" or "above" is not asked
_TRIES = 200


def random_side(rng: np.random.Generator, low: int, high: int) -> int:
    """A side in pixels; every second one is a multiple of 32 and needs no resizing."""
    if rng.random() < 0.5:
        return 32 * int(rng.integers(low // 32, high // 32 + 1))
    return int(rng.integers(low, high + 1))


def place_any(width: int, height: int, count: int, rng: np.random.Generator) -> list[Thing]:
    pairs = [(shape, color) for shape in SHAPES for color in COLORS]
    chosen = [pairs[int(i)] for i in rng.permutation(len(pairs))[:count]]
    return place(width, height, chosen, rng)


def place(
    width: int, height: int, chosen: list[tuple[str, str]], rng: np.random.Generator
) -> list[Thing]:
    """Puts the shapes apart from each other; empty if they did not fit."""
    placed: list[Thing] = []
    limit = min(width, height) / (2 if len(chosen) == 1 else 3) - 4
    for name, color in chosen:
        for _ in range(_TRIES):
            radius = rng.uniform(11, max(11.5, min(30.0, limit)))
            x = rng.uniform(radius + 2, width - radius - 2)
            y = rng.uniform(radius + 2, height - radius - 2)
            thing = shape_thing(name, color, (x, y), radius, rng)
            if all(_apart(thing, other) for other in placed):
                placed.append(thing)
                break
        else:
            return []
    return placed


def _apart(one: Thing, other: Thing) -> bool:
    gap_x = abs(one.x - other.x) - one.half_width - other.half_width
    gap_y = abs(one.y - other.y) - one.half_height - other.half_height
    return max(gap_x, gap_y) > 3 and abs(one.x - other.x) >= MIN_GAP
