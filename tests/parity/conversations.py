"""Conversations to compare on: fixed ones that name what is special, and a strategy for the rest.

Pictures are noise, so that every pixel, patch and frame differs from every other: a mix-up that
smooth pictures would hide changes the logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from qwen3vl_runtime import SamplingParams

__all__ = [
    "CONVERSATIONS",
    "PENALTY",
    "conversations",
    "image",
    "noise",
    "text",
    "user",
    "varied",
    "video",
]

Messages = list[dict[str, Any]]
Part = dict[str, Any]

#: Divides the logits of tokens that were said or asked before.
PENALTY = 5.0

_TEXTS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="<|>"), min_size=1, max_size=80
).filter(lambda value: bool(value.strip()))


def noise(seed: int, width: int, height: int) -> Image.Image:
    """An RGB picture of coarse noise, which survives resizing."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)


def text(value: str) -> Part:
    """A text part."""
    return {"type": "text", "text": value}


def image(seed: int, width: int = 96, height: int = 96) -> Part:
    """An image part."""
    return {"type": "image", "image": noise(seed, width, height)}


def video(seed: int, frames: int, width: int = 64, height: int = 64) -> Part:
    """A video part of which every frame is used."""
    return {
        "type": "video",
        "video": [noise(seed + index, width, height) for index in range(frames)],
        "raw_fps": 2.0,
        "do_sample_frames": False,
    }


def user(*parts: Part | str) -> Messages:
    """A conversation of one question."""
    content = [text(part) if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def varied(steps: int) -> SamplingParams:
    """Greedy decoding of `steps` tokens that hardly repeats any, not even after the answer's end.

    A random model left alone says one token for ever, whatever it sees.
    """
    return SamplingParams(
        max_new_tokens=steps, temperature=0, ignore_eos=True, repetition_penalty=PENALTY
    )


#: What is special about each is its name.
CONVERSATIONS: dict[str, Messages] = {
    "text": [{"role": "user", "content": "What color is the circle?"}],
    "one image": user(image(1), "What is this?"),
    "wide, tall and square image": [
        {"role": "system", "content": "Answer briefly."},
        *user(image(2, 200, 48), "and", image(3, 40, 180), image(4, 100, 100), "Which is larger?"),
    ],
    "two equal sizes around another": user(image(5), image(6, 64, 128), image(7), "Compare."),
    "video of odd length": user(video(20, 5), "What moves?"),
    "turns with images and a video": [
        *user(image(8, 128, 64), "Look."),
        {"role": "assistant", "content": "I see a square."},
        *user("Now this:", video(30, 4, 96, 64), "then", image(9, 64, 96), "What changed?"),
    ],
}


@st.composite
def conversations(draw: st.DrawFn) -> Messages:
    """One to three turns with up to three images and one video anywhere between the texts."""
    seed = draw(st.integers(0, 2**16))
    side = st.integers(8, 200)
    visuals = [
        image(seed + number, draw(side), draw(side)) for number in range(draw(st.integers(0, 3)))
    ]
    if draw(st.booleans()):
        visuals.append(video(seed + 100, draw(st.integers(1, 7)), draw(side), draw(side)))
    visuals = draw(st.permutations(visuals))
    messages: Messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(_TEXTS)})
    for remaining in range(draw(st.integers(1, 3)), 0, -1):
        count = len(visuals) if remaining == 1 else draw(st.integers(0, len(visuals)))
        own, visuals = visuals[:count], visuals[count:]
        position = draw(st.integers(0, len(own)))
        messages += user(*own[:position], draw(_TEXTS), *own[position:])
        if remaining > 1:
            messages.append({"role": "assistant", "content": draw(_TEXTS)})
    return messages
