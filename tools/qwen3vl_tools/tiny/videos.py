"""The families of short videos: a shape that moves, and a shape that changes its colour."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from qwen3vl_tools.tiny.drawing import COLORS, SHAPES, Thing, draw, make_background, shape_thing
from qwen3vl_tools.tiny.pictures import ORDINALS
from qwen3vl_tools.tiny.placement import random_side
from qwen3vl_tools.tiny.samples import Picture, Question, Video

__all__ = ["FRAME_RATES", "changing_video", "moving_video"]

FRAME_RATES = (1.0, 2.0, 4.0)
_DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


def moving_video(rng: np.random.Generator) -> Picture:
    """One shape moving straight to one side."""
    width, height = random_side(rng, 64, 128), random_side(rng, 64, 128)
    direction = list(_DIRECTIONS)[int(rng.integers(len(_DIRECTIONS)))]
    step_x, step_y = _DIRECTIONS[direction]
    num_frames = int(rng.integers(4, 9))
    radius = rng.uniform(10, 16)
    room = (width if step_x else height) - 2 * radius - 4
    distance = rng.uniform(26, room)
    center = np.array([rng.uniform(radius + 2, s - radius - 2) for s in (width, height)])
    axis = 0 if step_x else 1
    start = rng.uniform(radius + 2, radius + 2 + room - distance)
    sign = step_x + step_y
    center[axis] = start if sign > 0 else start + distance
    move = np.array([step_x, step_y]) * distance / (num_frames - 1)
    shape = _random_shape(radius, rng)
    path = [_moved(shape, center + i * move) for i in range(num_frames)]
    background = make_background(width, height, rng)
    frames = tuple(draw(background, [thing]) for thing in path)
    ends = range(1, num_frames + 1, 2)
    middles = tuple(
        (_moved(shape, center + (i - 0.5 if i < num_frames else i - 1) * move),) for i in ends
    )
    asked = (
        Question("move", "Which way does it move?", direction),
        Question("vcolor", "What color is the moving shape?", shape.color),
    )
    return Picture((), Video(frames, _frame_rate(rng)), asked, middles, direction)


def changing_video(rng: np.random.Generator) -> Picture:
    """One shape that stays where it is and changes colour between two pairs of frames.

    Both frames of a pair are equal, so only the order of the pairs tells the answer.
    """
    width, height = random_side(rng, 64, 128), random_side(rng, 64, 128)
    num_pairs = int(rng.integers(2, 5))
    change = int(rng.integers(1, num_pairs))
    radius = rng.uniform(11, 24)
    center = np.array([rng.uniform(radius + 2, s - radius - 2) for s in (width, height)])
    name = SHAPES[int(rng.integers(len(SHAPES)))]
    colors = [str(c) for c in rng.permutation(list(COLORS))[:2]]
    before, after = (
        shape_thing(name, color, (float(center[0]), float(center[1])), radius, rng)
        for color in colors
    )
    background = make_background(width, height, rng)
    pairs = tuple((before,) if pair < change else (after,) for pair in range(num_pairs))
    frames = tuple(draw(background, things) for things in pairs for _ in range(2))
    asked = tuple(
        Question("order", f"Which color came {ordinal}?", color)
        for ordinal, color in zip(ORDINALS, colors, strict=True)
    )
    return Picture((), Video(frames, _frame_rate(rng)), asked, pairs)


def _random_shape(radius: float, rng: np.random.Generator) -> Thing:
    name = SHAPES[int(rng.integers(len(SHAPES)))]
    color = list(COLORS)[int(rng.integers(len(COLORS)))]
    return shape_thing(name, color, (0.0, 0.0), radius, rng)


def _moved(thing: Thing, center: np.ndarray) -> Thing:
    return replace(thing, x=float(center[0]), y=float(center[1]))


def _frame_rate(rng: np.random.Generator) -> float:
    return FRAME_RATES[int(rng.integers(len(FRAME_RATES)))]
