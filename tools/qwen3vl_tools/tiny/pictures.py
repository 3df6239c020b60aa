"""The families of still pictures: scenes of shapes, numbers, and pairs of images."""

from __future__ import annotations

import numpy as np

from qwen3vl_tools.tiny.drawing import (
    COLORS,
    SHAPES,
    Thing,
    draw,
    make_background,
    measure_number,
    number_things,
)
from qwen3vl_tools.tiny.placement import MIN_GAP, place, place_any, random_side
from qwen3vl_tools.tiny.samples import Picture, Question

__all__ = ["ORDINALS", "number", "scene", "two_images"]

ORDINALS = ("first", "second")


def scene(rng: np.random.Generator) -> Picture:
    """One to three different coloured shapes on one image."""
    while True:
        width, height = random_side(rng, 64, 192), random_side(rng, 64, 192)
        things = place_any(width, height, int(rng.integers(1, 4)), rng)
        if things:
            break
    image = draw(make_background(width, height, rng), things)
    return Picture((image,), None, tuple(_scene_questions(things)), (tuple(things),))


def _scene_questions(things: list[Thing]) -> list[Question]:
    names = [t.name for t in things]
    colors = [t.color for t in things]
    asked = []
    for thing in things:
        if names.count(thing.name) == 1:
            asked.append(Question("color", f"What color is the {thing.name}?", thing.color))
        if colors.count(thing.color) == 1:
            asked.append(Question("shape", f"What shape is {thing.color}?", thing.name))
    asked += _position_questions(things)
    asked += [
        Question("count", f"How many {name}s are there?", str(names.count(name)))
        for name in SHAPES
        if name in names
    ]
    asked.append(Question("count", "How many shapes are there?", str(len(things))))
    parts = [f"{t.color} {t.name}" for t in sorted(things, key=lambda t: t.x)]
    listed = ", a ".join(parts[:-1]) + " and a " + parts[-1] if len(parts) > 1 else parts[0]
    asked.append(Question("describe", "Describe the image.", f"A {listed}."))
    return asked


def _position_questions(things: list[Thing]) -> list[Question]:
    if len(things) < 2:
        return []
    asked = []
    for where, axis, first in (
        ("on the left", "x", True),
        ("on the right", "x", False),
        ("at the top", "y", True),
        ("at the bottom", "y", False),
    ):
        ranked = sorted(things, key=lambda t: getattr(t, axis), reverse=not first)
        if abs(getattr(ranked[0], axis) - getattr(ranked[1], axis)) >= MIN_GAP:
            asked.append(Question("pos", f"What shape is {where}?", ranked[0].name))
    return asked


def number(rng: np.random.Generator) -> Picture:
    """A number from 0 to 99 somewhere on one image."""
    width, height = random_side(rng, 64, 128), random_side(rng, 64, 128)
    text = str(rng.integers(10) if rng.random() < 0.4 else rng.integers(10, 100))
    size = int(rng.integers(32, 43))
    text_width, text_height = measure_number(text, size)
    left = rng.uniform(4, width - text_width - 4)
    top = rng.uniform(4, height - text_height - 4)
    background = make_background(width, height, rng)
    grey = int(rng.integers(0, 61) if background.is_light else rng.integers(215, 256))
    things = number_things(text, size, left, top, (grey, grey, grey))
    question = Question("read", "Read the number.", text)
    return Picture((draw(background, things, size),), None, (question,), (things,))


def two_images(rng: np.random.Generator) -> Picture:
    """The same shape in two colours on two images, sometimes beside something else."""
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    colors = rng.permutation(list(COLORS))[:2]
    images, things = [], []
    for color in colors:
        width, height = random_side(rng, 64, 128), random_side(rng, 64, 128)
        placed: list[Thing] = []
        while not placed:
            decoys = [(s, c) for s in SHAPES if s != shape for c in COLORS if rng.random() < 0.5]
            chosen = [(shape, str(color))]
            if decoys and rng.random() < 0.5:
                chosen.append(decoys[int(rng.integers(len(decoys)))])
            placed = place(width, height, chosen, rng)
        images.append(draw(make_background(width, height, rng), placed))
        things.append(tuple(placed))
    asked = []
    for color, ordinal in zip(colors, ORDINALS, strict=True):
        asked.append(Question("which", f"Which image has the {color} {shape}?", ordinal))
        asked.append(
            Question("color2", f"What color is the {shape} in the {ordinal} image?", str(color))
        )
    return Picture(tuple(images), None, tuple(asked), tuple(things))
