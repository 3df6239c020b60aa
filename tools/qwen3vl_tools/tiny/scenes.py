"""Questions about drawn pictures and short videos, with their answers.

A `Picture` is what was drawn and every question that can be asked about it (training uses them
all at once); a `Sample` is one of those questions. Needs numpy and pillow only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from qwen3vl_tools.tiny.pictures import number, scene, two_images
from qwen3vl_tools.tiny.samples import Picture, Question, Sample, Video
from qwen3vl_tools.tiny.videos import changing_video, moving_video

__all__ = [
    "FAMILIES",
    "KINDS",
    "Picture",
    "Question",
    "Sample",
    "Video",
    "held_out",
    "make_picture",
    "make_sample",
]

FAMILIES: dict[str, Callable[[np.random.Generator], Picture]] = {
    "scene": scene,
    "number": number,
    "two": two_images,
    "moving": moving_video,
    "changing": changing_video,
}
_FAMILY_OF_KIND: dict[str, str] = {
    "color": "scene",
    "shape": "scene",
    "pos": "scene",
    "count": "scene",
    "describe": "scene",
    "read": "number",
    "which": "two",
    "color2": "two",
    "move": "moving",
    "vcolor": "moving",
    "order": "changing",
}
KINDS: tuple[str, ...] = tuple(_FAMILY_OF_KIND)


def make_sample(kind: str, rng: np.random.Generator) -> Sample:
    """Draws pictures until one allows a question of this kind, and asks it."""
    family = _FAMILY_OF_KIND[kind]
    while True:
        picture = FAMILIES[family](rng)
        questions = [q for q in picture.questions if q.kind == kind]
        if questions:
            chosen = questions[int(rng.integers(len(questions)))]
            return Sample(kind, picture.images, picture.video, chosen.question, chosen.answer)


def held_out(kind: str, count: int, seed: int) -> list[Sample]:
    """The same `count` samples of one kind for the same seed, whatever other kinds are drawn."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    return [make_sample(kind, rng) for _ in range(count)]


def make_picture(family: str, rng: np.random.Generator) -> Picture:
    """Draws one picture of a family, a key of `FAMILIES`."""
    return FAMILIES[family](rng)
