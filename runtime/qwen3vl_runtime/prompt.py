"""From the rendered chat to token ids, with a place for every visual token.

The layout is that of transformers 4.57 and 5.0, the one Qwen3-VL was trained with: each
`<|image_pad|>` becomes one placeholder a visual token, and each
`<|vision_start|><|video_pad|><|vision_end|>` is replaced as a whole by one
`<T seconds><|vision_start|>placeholders<|vision_end|>` a temporal patch. transformers 5.24 replaces
only the bare `<|video_pad|>`, which leaves an outer pair of vision tokens around these spans; the
spans themselves are the same. A bare `<|video_pad|>` is replaced alone here too.

Nothing here looks at pixels or embeddings: a visual is its kind, its grid and its timestamps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.errors import BundleError, InputError
from qwen3vl_runtime.limits import MAX_SECONDS, is_real
from qwen3vl_runtime.tokenizer import Tokenizer

__all__ = ["PromptLayout", "Visual", "VisualKind", "VisualSpan", "layout_prompt"]

VisualKind = Literal["image", "video"]

_TOKEN_TYPES: dict[VisualKind, int] = {"image": 1, "video": 2}


@dataclass(frozen=True)
class Visual:
    """What the layout needs to know of one image or video.

    Attributes:
        kind: "image" or "video".
        grid_thw: (t, h, w) in patches, before merging.
        timestamps: Seconds, one per temporal patch of a video; empty for an image.
    """

    kind: VisualKind
    grid_thw: tuple[int, int, int]
    timestamps: tuple[float, ...] = ()


@dataclass(frozen=True)
class VisualSpan:
    """Where one image, or one temporal patch of a video, stands in the prompt.

    Attributes:
        visual: Index into the visuals given to `layout_prompt`.
        kind: "image" or "video".
        frame: Temporal patch of the video; 0 for an image.
        start: First placeholder, an index into `input_ids`.
        end: One past the last placeholder.
    """

    visual: int
    kind: VisualKind
    frame: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class PromptLayout:
    """One prompt, ready for the embedding graph; arrays are read-only.

    Attributes:
        input_ids: int64 [seq].
        visual_indices: int64 [seq]; -1 on text, else the row of the visual embeddings,
            concatenated over all visuals in order of appearance, images and videos mixed.
        token_types: int64 [seq]; 0 text, 1 image, 2 video.
        spans: One per image and per temporal patch of a video, in order.
    """

    input_ids: NDArray[np.int64]
    visual_indices: NDArray[np.int64]
    token_types: NDArray[np.int64]
    spans: tuple[VisualSpan, ...]

    @property
    def num_visual_tokens(self) -> int:
        """Rows the concatenated visual embeddings must have."""
        return sum(span.end - span.start for span in self.spans)


def layout_prompt(
    text: str, visuals: Sequence[Visual], tokenizer: Tokenizer, config: ModelConfig
) -> PromptLayout:
    """Expand the placeholders of a rendered chat and tokenize it once.

    Args:
        text: Rendered chat with one placeholder a visual.
        visuals: The visuals in the order of the messages.
        tokenizer: The checkpoint's tokenizer.
        config: Gives the token ids of the placeholders and the spatial merge size.

    Raises:
        InputError: The prompt is empty, a visual's grid or timestamps cannot be, or the
            placeholders in the text differ from the visuals in number, kind or order (which also
            catches user text that spells out a placeholder).
        BundleError: The tokenizer does not know the placeholder tokens of the config.
    """
    if not text:
        raise InputError("the prompt is empty; give at least one message with some content")
    merge_size = config.vision.spatial_merge_size
    for index, visual in enumerate(visuals):
        _check_visual(visual, index, merge_size)
    tokens = _VisionTokens.from_config(tokenizer, config)
    matches = list(tokens.placeholder_pattern().finditer(text))
    _check_placeholders(["video" if tokens.video in m[0] else "image" for m in matches], visuals)
    pieces: list[str] = []
    end = 0
    for match, visual in zip(matches, visuals, strict=True):
        pieces += (text[end : match.start()], tokens.expand(visual, merge_size))
        end = match.end()
    ids = np.array(tokenizer.encode("".join((*pieces, text[end:]))), dtype=np.int64)  # [seq]
    return _build_layout(ids, visuals, config)


@dataclass(frozen=True)
class _VisionTokens:
    """The strings of the four vision tokens."""

    image: str
    video: str
    start: str
    end: str

    @classmethod
    def from_config(cls, tokenizer: Tokenizer, config: ModelConfig) -> _VisionTokens:
        names = (
            "image_token_id",
            "video_token_id",
            "vision_start_token_id",
            "vision_end_token_id",
        )
        strings = []
        for name in names:
            token_id = getattr(config, name)
            token = tokenizer.id_to_token(token_id)
            if token is None or tokenizer.encode(token) != [token_id]:
                raise BundleError(
                    f"expected {name} {token_id} of the config to be a special token, found "
                    f"{token!r} in the tokenizer; take both from the same checkpoint"
                )
            strings.append(token)
        return cls(*strings)

    def placeholder_pattern(self) -> re.Pattern[str]:
        whole = re.escape(self.start + self.video + self.end)
        return re.compile(f"{whole}|{re.escape(self.video)}|{re.escape(self.image)}")

    def expand(self, visual: Visual, merge_size: int) -> str:
        frame_tokens = _tokens_per_frame(visual, merge_size)
        if visual.kind == "image":
            return self.image * (visual.grid_thw[0] * frame_tokens)
        pads = self.video * frame_tokens
        return "".join(
            f"<{seconds:.1f} seconds>{self.start}{pads}{self.end}" for seconds in visual.timestamps
        )


def _tokens_per_frame(visual: Visual, merge_size: int) -> int:
    """Visual tokens of one temporal patch."""
    return visual.grid_thw[1] * visual.grid_thw[2] // merge_size**2


def _check_visual(visual: Visual, index: int, merge_size: int) -> None:
    if visual.kind not in _TOKEN_TYPES:
        raise InputError(f"visual {index} must be an image or a video, found {visual.kind!r}")
    t, h, w = visual.grid_thw
    if min(t, h, w) < 1 or h % merge_size or w % merge_size:
        raise InputError(
            f"{visual.kind} {index} must have a positive grid (t, h, w) with h and w multiples of "
            f"{merge_size}, found {visual.grid_thw}"
        )
    num_times = t if visual.kind == "video" else 0
    if len(visual.timestamps) != num_times:
        raise InputError(
            f"{visual.kind} {index} with grid {visual.grid_thw} must have {num_times} timestamps, "
            f"found {len(visual.timestamps)}"
        )
    if not all(is_real(seconds, 0, MAX_SECONDS) for seconds in visual.timestamps):
        raise InputError(
            f"{visual.kind} {index} must have timestamps in seconds that are finite and not "
            f"negative, found {list(visual.timestamps)}"
        )


def _check_placeholders(found: Sequence[str], visuals: Sequence[Visual]) -> None:
    given = [visual.kind for visual in visuals]
    if found == given:
        return
    counts = (
        f"{found.count('image')} image and {found.count('video')} video placeholders for "
        f"{given.count('image')} images and {given.count('video')} videos"
    )
    if sorted(found) == sorted(given):
        raise InputError(
            f"the prompt has its placeholders in another order than the messages: expected "
            f"{given}, found {found}; the text itself must not contain placeholder tokens"
        )
    raise InputError(
        f"the prompt has {counts}; the text itself must not contain placeholder tokens, and the "
        "chat template must give each image and video one"
    )


def _build_layout(
    ids: NDArray[np.int64], visuals: Sequence[Visual], config: ModelConfig
) -> PromptLayout:
    token_types = np.zeros_like(ids)  # [seq]
    token_types[ids == config.image_token_id] = _TOKEN_TYPES["image"]
    token_types[ids == config.video_token_id] = _TOKEN_TYPES["video"]
    positions = np.flatnonzero(token_types)  # [visual tokens]
    visual_indices = np.full_like(ids, -1)  # [seq]
    visual_indices[positions] = np.arange(len(positions))
    spans = _spans(positions, visuals, config.vision.spatial_merge_size)
    for span in spans:
        # Placeholders are special tokens, so the tokenizer can neither split, drop nor move them.
        assert (token_types[span.start : span.end] == _TOKEN_TYPES[span.kind]).all()
    for array in (ids, visual_indices, token_types):
        array.setflags(write=False)
    return PromptLayout(ids, visual_indices, token_types, spans)


def _spans(
    positions: NDArray[np.int64], visuals: Sequence[Visual], merge_size: int
) -> tuple[VisualSpan, ...]:
    """Cut the placeholder positions into one span an image and one a temporal patch of a video."""
    spans: list[VisualSpan] = []
    row = 0
    for index, visual in enumerate(visuals):
        is_image = visual.kind == "image"
        frame_tokens = _tokens_per_frame(visual, merge_size)
        length = visual.grid_thw[0] * frame_tokens if is_image else frame_tokens
        for frame in range(1 if is_image else visual.grid_thw[0]):
            start, last = int(positions[row]), int(positions[row + length - 1])
            assert last - start == length - 1
            spans.append(VisualSpan(index, visual.kind, frame, start, last + 1))
            row += length
    assert row == len(positions)
    return tuple(spans)
