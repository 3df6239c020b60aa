"""Chat messages in the Qwen / OpenAI content-list form, parsed once into frozen dataclasses.

A message is `{"role": ..., "content": ...}`; its content is a string or a list of parts:

- `{"type": "text", "text": str}`
- `{"type": "image", "image": source}` or `"image_url": url`, or OpenAI's `{"type": "image_url",
  "image_url": {"url": url, "detail": str}}`; options `min_pixels`, `max_pixels`
- `{"type": "video", "video": source}`; also `fps`, `num_frames`, `raw_fps`, `do_sample_frames`
- what the vision encoder made of a picture earlier: `{"type": "image", "image_embeds": array,
  "image_grid_thw": [t, h, w]}`, or `{"type": "video", "video_embeds": array,
  "video_grid_thw": [t, h, w], "timestamps": [seconds, ...]}`

`type` may be left out when one of the keys already tells, as Qwen allows. Sources stay as given:
this module opens no file and decodes no pixels. An unknown key is an error, because a misspelled
option that is skipped in silence changes the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen3vl_export.errors import InputError
from qwen3vl_runtime.limits import (
    MAX_INTEGER,
    MAX_SECONDS,
    is_integer,
    is_real,
    positive_fps,
    shown,
)

__all__ = [
    "ImagePart",
    "Message",
    "TextPart",
    "VideoPart",
    "VisualFeatures",
    "parse_messages",
    "visual_parts",
]

logger = logging.getLogger(__name__)

_ROLES = ("system", "user", "assistant", "tool")
# The keys that may carry the content of a part, by declared type; a part has exactly one of them.
_CONTENT_KEYS = {
    "text": ("text",),
    "image": ("image", "image_url", "image_embeds"),
    "image_url": ("image_url",),
    "video": ("video", "video_embeds"),
}
_PIXEL_OPTIONS = ("min_pixels", "max_pixels")
_VIDEO_OPTIONS = (*_PIXEL_OPTIONS, "fps", "num_frames", "raw_fps", "do_sample_frames")


@dataclass(frozen=True, eq=False)
class VisualFeatures:
    """Vision encoder output that replaces the pixels of one image or video.

    Attributes:
        embeds: [tokens, hidden_size * (1 + DeepStack levels)], floating point: the final
            features of each visual token, then those of each level, side by side.
        grid_thw: (t, h, w) in patches, before merging.
        timestamps: Seconds, one per temporal patch of a video; empty for an image.
    """

    embeds: NDArray[Any]
    grid_thw: tuple[int, int, int]
    timestamps: tuple[float, ...] = ()


@dataclass(frozen=True)
class TextPart:
    """A piece of text."""

    text: str


@dataclass(frozen=True, eq=False)
class ImagePart:
    """An image: either a `source` to load, or `features` computed earlier; bounds in pixels."""

    source: Any = None
    features: VisualFeatures | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, eq=False)
class VideoPart:
    """A video: either a `source` (path, URL, frames) to load, or `features` computed earlier.

    `fps` and `num_frames` (to sample per second, or in all) exclude each other; `raw_fps` is the
    rate of a source that carries none; `do_sample_frames` false takes every frame.
    """

    source: Any = None
    features: VisualFeatures | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    raw_fps: float | None = None
    do_sample_frames: bool | None = None


Part = TextPart | ImagePart | VideoPart


@dataclass(frozen=True)
class Message:
    """One turn; `is_plain` tells that the content was one string, which a template can see."""

    role: str
    parts: tuple[Part, ...]
    is_plain: bool = False


def parse_messages(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Check a conversation and parse it.

    An empty string is content (it switches a default system prompt off); an empty list is not.

    Raises:
        InputError: The conversation is empty, or a message has an unknown key, role or type, a
            value of the wrong type, or no content. The message index and the key are named.
    """
    if not isinstance(messages, (list, tuple)):
        raise _wrong("messages", "a list of objects", messages)
    if not messages:
        raise InputError("messages is empty; give at least one message with a role and a content")
    return tuple(_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def visual_parts(messages: Sequence[Message]) -> tuple[ImagePart | VideoPart, ...]:
    """Images and videos of a conversation, in the order in which they appear."""
    return tuple(p for m in messages for p in m.parts if not isinstance(p, TextPart))


def _parse_message(message: Any, where: str) -> Message:
    _refuse_unknown_keys(message, ("role", "content"), where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    if isinstance(content, str):
        return Message(role, (TextPart(content),), is_plain=True)
    if not isinstance(content, (list, tuple)) or not content:
        raise _wrong(f"{where}.content", "a string or a non-empty list of parts", content)
    parts = tuple(_parse_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    return Message(role, parts)


def _parse_part(part: Any, where: str) -> Part:
    if not isinstance(part, Mapping):
        raise _wrong(where, "an object", part)
    key = _content_key(part, where)
    if key == "text":
        _refuse_unknown_keys(part, ("type", "text"), where)
        if not isinstance(part["text"], str):
            raise _wrong(f"{where}.text", "a string", part["text"])
        return TextPart(part["text"])
    if key in ("image_embeds", "video_embeds"):
        return _parse_features(part, key.removesuffix("_embeds"), where)
    return _parse_video(part, where) if key == "video" else _parse_image(part, where)


def _content_key(part: Mapping[str, Any], where: str) -> str:
    """The one key that carries the content of this part."""
    expected = all_keys = tuple(dict.fromkeys(k for keys in _CONTENT_KEYS.values() for k in keys))
    if "type" in part:
        declared = part["type"]
        if not isinstance(declared, str) or declared not in _CONTENT_KEYS:
            raise _wrong(f"{where}.type", f"one of {', '.join(_CONTENT_KEYS)}", declared)
        expected = _CONTENT_KEYS[declared]
    found = [key for key in all_keys if key in part]
    if len(found) != 1 or found[0] not in expected:
        wanted = f"an object with exactly one of {', '.join(expected)}"
        raise InputError(f"{where} must be {wanted}, found {', '.join(found) or 'none of them'}")
    return found[0]


def _parse_image(part: Mapping[str, Any], where: str) -> ImagePart:
    _refuse_unknown_keys(part, ("type", "image", "image_url", *_PIXEL_OPTIONS), where)
    if "image" in part:
        source = _source(part["image"], f"{where}.image")
    else:
        source = _image_url(part["image_url"], f"{where}.image_url")
    min_pixels, max_pixels = _pixel_bounds(part, where)
    return ImagePart(source, None, min_pixels, max_pixels)


def _image_url(value: Any, where: str) -> str:
    """The URL, plain or in OpenAI's object, whose `detail` has no counterpart in Qwen3-VL."""
    url = value
    if isinstance(value, Mapping):
        _refuse_unknown_keys(value, ("url", "detail"), where)
        url, detail = value.get("url"), value.get("detail", "auto")
        if detail not in ("auto", "low", "high"):
            raise _wrong(f"{where}.detail", "auto, low or high", detail)
        if detail != "auto":
            logger.warning("%s.detail %r has no effect; use min_pixels, max_pixels", where, detail)
    if not isinstance(url, str) or not url:
        raise _wrong(where, "a URL or an object with a url", value)
    return url


def _parse_video(part: Mapping[str, Any], where: str) -> VideoPart:
    _refuse_unknown_keys(part, ("type", "video", *_VIDEO_OPTIONS), where)
    if "fps" in part and "num_frames" in part:
        raise InputError(f"{where} has both fps and num_frames; give only one of them")
    do_sample_frames = part.get("do_sample_frames")
    if "do_sample_frames" in part and not isinstance(do_sample_frames, bool):
        raise _wrong(f"{where}.do_sample_frames", "true or false", do_sample_frames)
    min_pixels, max_pixels = _pixel_bounds(part, where)
    return VideoPart(
        source=_source(part["video"], f"{where}.video"),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        fps=_frame_rate(part, "fps", where),
        num_frames=_positive_integer(part, "num_frames", where),
        raw_fps=_frame_rate(part, "raw_fps", where),
        do_sample_frames=do_sample_frames,
    )


def _parse_features(part: Mapping[str, Any], kind: str, where: str) -> ImagePart | VideoPart:
    embeds_key, grid_key = f"{kind}_embeds", f"{kind}_grid_thw"
    times_key = ("timestamps",) if kind == "video" else ()
    _refuse_unknown_keys(part, ("type", embeds_key, grid_key, *times_key), where)
    embeds = _embeds(part[embeds_key], f"{where}.{embeds_key}")
    grid = _sequence(part.get(grid_key))
    if len(grid) != 3 or not all(is_integer(n) for n in grid):
        raise _wrong(f"{where}.{grid_key}", "three positive integers [t, h, w]", part.get(grid_key))
    grid_thw = (int(grid[0]), int(grid[1]), int(grid[2]))
    if kind == "image":
        return ImagePart(features=VisualFeatures(embeds, grid_thw))
    times = _sequence(part.get("timestamps"))
    are_seconds = all(is_real(s, 0, MAX_SECONDS) for s in times)
    if len(times) != grid_thw[0] or not are_seconds:
        expected = f"{grid_thw[0]} times in seconds (one per temporal patch of {list(grid_thw)})"
        raise _wrong(f"{where}.timestamps", expected, part.get("timestamps"))
    return VideoPart(features=VisualFeatures(embeds, grid_thw, tuple(float(s) for s in times)))


def _embeds(value: Any, where: str) -> NDArray[Any]:
    try:
        embeds = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as e:  # ragged lists; tensors on another device
        raise InputError(f"{where} must be a floating-point array [tokens, width]: {e}") from e
    is_float = embeds.dtype.kind == "f" or embeds.dtype.name == "bfloat16"
    if embeds.ndim != 2 or 0 in embeds.shape or not is_float:
        raise InputError(
            f"{where} must be a floating-point array [tokens, width], found {embeds.dtype} with "
            f"shape {list(embeds.shape)}"
        )
    if not np.isfinite(embeds).all():
        raise InputError(f"{where} must hold finite numbers, found NaN or infinity; encode again")
    return embeds


def _pixel_bounds(part: Mapping[str, Any], where: str) -> tuple[int | None, int | None]:
    low, high = (_positive_integer(part, key, where) for key in _PIXEL_OPTIONS)
    if low and high and low > high:
        raise InputError(f"{where}.min_pixels {low} must not exceed max_pixels {high}")
    return low, high


def _positive_integer(part: Mapping[str, Any], key: str, where: str) -> int | None:
    if key not in part:
        return None
    if not is_integer(part[key]):
        raise _wrong(f"{where}.{key}", f"a positive integer up to {MAX_INTEGER}", part[key])
    return int(part[key])


def _frame_rate(part: Mapping[str, Any], key: str, where: str) -> float | None:
    return positive_fps(part[key], f"{where}.{key}") if key in part else None


def _source(value: Any, where: str) -> Any:
    is_empty = value is None or (isinstance(value, (str, bytes, list, tuple)) and not value)
    if is_empty or isinstance(value, (Real, Mapping)):
        raise _wrong(where, "a path, a URL or the pixels themselves", value)
    return value


def _sequence(value: Any) -> Sequence[Any]:
    """The items of a list, tuple or array; nothing for anything else."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return list(value)
    return value if isinstance(value, (list, tuple)) else ()


def _refuse_unknown_keys(part: Any, known: Sequence[str], where: str) -> None:
    if not isinstance(part, Mapping):
        raise _wrong(where, "an object", part)
    unknown = [key for key in part if key not in known]
    if unknown:
        raise InputError(f"{where} has the unknown key {unknown[0]!r}; allowed: {', '.join(known)}")


def _wrong(where: str, expected: str, found: Any) -> InputError:
    return InputError(f"{where} must be {expected}, found {shown(found)}")
