"""Draws what the questions are about: coloured shapes and numbers on uneven backgrounds.

Knows pictures only; questions and answers live in `scenes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

__all__ = ["COLORS", "SHAPES", "Background", "Thing", "draw", "make_background", "measure_number"]

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 35, 35),
    "green": (35, 165, 60),
    "blue": (40, 75, 225),
    "yellow": (240, 205, 30),
    "purple": (150, 50, 185),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle")

# Colours lie between the two in brightness, so every shape stands out in grey too.
_LIGHT_LEVELS = (195, 250)
_DARK_LEVELS = (5, 45)
_COLOR_JITTER = 14


@dataclass(frozen=True)
class Thing:
    """One drawn object: a shape, or one digit of a number.

    Attributes:
        name: "circle", "square", "triangle", or a digit "0" to "9".
        color: a key of `COLORS`; "grey" for digits.
        rgb: the colour as drawn.
        x: horizontal centre in pixels.
        y: vertical centre in pixels.
        half_width: half the width of the bounding box.
        half_height: half the height of the bounding box.
    """

    name: str
    color: str
    rgb: tuple[int, int, int]
    x: float
    y: float
    half_width: float
    half_height: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom in pixels."""
        return (
            self.x - self.half_width,
            self.y - self.half_height,
            self.x + self.half_width,
            self.y + self.half_height,
        )


@dataclass(frozen=True)
class Background:
    """What lies behind the things.

    Attributes:
        pixels: (height, width, 3) float64, not yet clipped.
        is_light: whether dark digits are the readable ones.
    """

    pixels: NDArray[np.float64]
    is_light: bool


def make_background(width: int, height: int, rng: np.random.Generator) -> Background:
    """A tinted grey, sometimes with a gradient and sometimes with grey noise."""
    is_light = rng.random() < 0.65
    level = rng.uniform(*(_LIGHT_LEVELS if is_light else _DARK_LEVELS))
    pixels = np.empty((height, width, 3), np.float64)
    pixels[:] = level + rng.uniform(-12, 12, 3)
    if rng.random() < 0.3:
        angle = rng.uniform(0, 2 * np.pi)
        down = np.linspace(-1, 1, height)[:, None] * np.sin(angle)
        across = np.linspace(-1, 1, width)[None, :] * np.cos(angle)
        pixels += (20 * (down + across) / max(1e-6, abs(np.sin(angle)) + abs(np.cos(angle))))[
            ..., None
        ]
    if rng.random() < 0.3:
        pixels += rng.normal(0, 6, (height, width, 1))
    return Background(pixels, is_light)


def jitter(color: str, rng: np.random.Generator) -> tuple[int, int, int]:
    """The named colour, each channel moved a little."""
    low, high = -_COLOR_JITTER, _COLOR_JITTER + 1
    red, green, blue = (int(np.clip(c + rng.integers(low, high), 0, 255)) for c in COLORS[color])
    return red, green, blue


def shape_thing(
    name: str, color: str, center: tuple[float, float], radius: float, rng: np.random.Generator
) -> Thing:
    """A shape with a freshly jittered colour."""
    half = 0.9 * radius if name == "square" else radius
    return Thing(name, color, jitter(color, rng), center[0], center[1], half, half)


def measure_number(text: str, size: int) -> tuple[float, float]:
    """Width and height in pixels of `text` in the default font."""
    left, top, right, bottom = _font(size).getbbox(text)
    return right - left, bottom - top


def number_things(
    text: str, size: int, left: float, top: float, rgb: tuple[int, int, int]
) -> tuple[Thing, ...]:
    """One `Thing` a digit, laid out as `draw` will draw them."""
    font = _font(size)
    things = []
    for index, digit in enumerate(text):
        advance = font.getlength(text[:index])
        x0, y0, x1, y1 = font.getbbox(digit)
        offset = top - font.getbbox(text)[1]
        things.append(
            Thing(
                digit,
                "grey",
                rgb,
                left + advance + (x0 + x1) / 2,
                offset + (y0 + y1) / 2,
                (x1 - x0) / 2,
                (y1 - y0) / 2,
            )
        )
    return tuple(things)


def draw(background: Background, things: Sequence[Thing], font_size: int = 0) -> Image.Image:
    """Paints the things over the background; digits need `font_size`."""
    image = Image.fromarray(np.clip(background.pixels, 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for thing in things:
        _paint(pen, thing, font_size)
    return image


def _paint(pen: ImageDraw.ImageDraw, thing: Thing, font_size: int) -> None:
    left, top, right, bottom = thing.box
    if thing.name == "circle":
        pen.ellipse((left, top, right, bottom), fill=thing.rgb)
    elif thing.name == "square":
        pen.rectangle((left, top, right, bottom), fill=thing.rgb)
    elif thing.name == "triangle":
        base = thing.y + 0.85 * thing.half_height
        pen.polygon([(thing.x, top), (right, base), (left, base)], fill=thing.rgb)
    else:
        font = _font(font_size)
        x0, y0, _, _ = font.getbbox(thing.name)
        pen.text((left - x0, top - y0), thing.name, fill=thing.rgb, font=font)


def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("pillow was built without FreeType, which drawing numbers needs")
    return font
