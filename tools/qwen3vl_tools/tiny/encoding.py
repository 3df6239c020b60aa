"""Turns pictures and questions into patches, token ids and positions, without torch.

Follows the processor settings in the checkpoint's preprocessor files. Training asks several
questions about one picture in one row: each question is a *branch* which sees the picture and
itself only, and whose positions restart after the picture, as if it were asked alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from qwen3vl_tools.tiny.scenes import Picture, Question, Sample, Video

__all__ = ["IGNORED", "Codec", "Frame", "Row", "as_picture"]

IGNORED = -100  # label of positions that are not part of an answer
PATCH_SIZE = 16
MERGE_SIZE = 2
FACTOR = PATCH_SIZE * MERGE_SIZE
_IMAGE_PIXELS = (4096, 36864)
_VIDEO_PIXELS = (16384, 131072)


@dataclass(frozen=True)
class Frame:
    """One temporal patch: an image, or two successive frames of a video.

    Attributes:
        patches: (grid_h * grid_w, 1536) float32, 2 x 2 merge blocks in sequence.
        grid: patches down and across.
        scale: pixels after resizing for one pixel before, across and down.
    """

    patches: NDArray[np.float32]
    grid: tuple[int, int]
    scale: tuple[float, float]


@dataclass(frozen=True)
class Row:
    """One picture with its questions as a row of tokens.

    Attributes:
        frames: the temporal patches, in token order.
        input_ids: (length,) int64.
        position_ids: (3, length) int64.
        branches: (length,) int64; 0 is seen by all, other numbers only by themselves.
        labels: (length,) int64; the token this position has to say next, or `IGNORED`.
        weights: (length,) float32; how much each label counts in training. Long answers count
            more than short ones, but less than by their length.
    """

    frames: tuple[Frame, ...]
    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    branches: NDArray[np.int64]
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]


@dataclass
class _Tokens:
    """A row under construction."""

    ids: list[int]
    positions: list[tuple[int, int, int]]
    branches: list[int]
    labels: list[int]
    weights: list[float]
    next_position: int = 0

    def text(self, ids: Sequence[int], branch: int, is_answer: bool = False) -> None:
        for token in ids:
            if is_answer:
                self.labels[-1] = token
                self.weights[-1] = len(ids) ** -0.5
            self.ids.append(token)
            self.positions.append((self.next_position,) * 3)
            self.branches.append(branch)
            self.labels.append(IGNORED)
            self.weights.append(0.0)
            self.next_position += 1

    def vision(self, token: int, grid: tuple[int, int]) -> None:
        height, width = grid[0] // MERGE_SIZE, grid[1] // MERGE_SIZE
        start = self.next_position
        for row in range(height):
            for column in range(width):
                self.ids.append(token)
                self.positions.append((start, start + row, start + column))
                self.branches.append(0)
                self.labels.append(IGNORED)
                self.weights.append(0.0)
        self.next_position = start + max(height, width)


class Codec:
    """Encodes rows with one checkpoint's tokenizer."""

    def __init__(self, checkpoint: Path) -> None:
        """Reads `tokenizer.json` of the checkpoint."""
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self._vision_start = self._id("<|vision_start|>")
        self._vision_end = self._id("<|vision_end|>")
        self._image_pad = self._id("<|image_pad|>")
        self._video_pad = self._id("<|video_pad|>")
        self.end = self._id("<|im_end|>")

    def ids(self, text: str) -> list[int]:
        """Token ids of text, special tokens included."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def row(
        self,
        picture: Picture,
        questions: Sequence[Question],
        *,
        as_chat: bool = False,
        nested: bool = False,
    ) -> Row:
        """Encodes a picture and questions about it.

        Args:
            picture: the images or the video.
            questions: what is asked about it.
            as_chat: ask the questions one after the other in one conversation instead of side
                by side.
            nested: put a video into one more pair of vision tokens, as some processors do.
        """
        tokens = _Tokens([], [], [], [], [])
        tokens.text(self.ids("<|im_start|>user\n"), 0)
        frames = (
            self._images(tokens, picture.images)
            if picture.video is None
            else self._video(tokens, picture.video, nested)
        )
        start = tokens.next_position
        for number, question in enumerate(questions, start=1):
            branch = 0 if as_chat else number
            if as_chat and number > 1:
                tokens.text(self.ids("\n<|im_start|>user\n"), branch)
            elif not as_chat:
                tokens.next_position = start
            ask = f"{question.question}<|im_end|>\n<|im_start|>assistant\n"
            tokens.text(self.ids(ask), branch)
            tokens.text([*self.ids(question.answer), self.end], branch, is_answer=True)
        return Row(
            frames,
            np.array(tokens.ids, np.int64),
            np.array(tokens.positions, np.int64).T,
            np.array(tokens.branches, np.int64),
            np.array(tokens.labels, np.int64),
            np.array(tokens.weights, np.float32),
        )

    def _images(self, tokens: _Tokens, images: Sequence[Image.Image]) -> tuple[Frame, ...]:
        frames = []
        for image in images:
            frame = _frame((image, image), _IMAGE_PIXELS, 1)
            tokens.text([self._vision_start], 0)
            tokens.vision(self._image_pad, frame.grid)
            tokens.text([self._vision_end], 0)
            frames.append(frame)
        return tuple(frames)

    def _video(self, tokens: _Tokens, video: Video, nested: bool) -> tuple[Frame, ...]:
        times = [index / video.fps for index in range(len(video.frames))]
        images = list(video.frames)
        if len(images) % 2:
            images.append(images[-1])
            times.append(times[-1])
        if nested:
            tokens.text([self._vision_start], 0)
        frames = []
        for first in range(0, len(images), 2):
            frame = _frame((images[first], images[first + 1]), _VIDEO_PIXELS, len(images))
            seconds = (times[first] + times[first + 1]) / 2
            tokens.text([*self.ids(f"<{seconds:.1f} seconds>"), self._vision_start], 0)
            tokens.vision(self._video_pad, frame.grid)
            tokens.text([self._vision_end], 0)
            frames.append(frame)
        if nested:
            tokens.text([self._vision_end], 0)
        return tuple(frames)

    def _id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no token {token}")
        return int(found)


def as_picture(sample: Sample) -> tuple[Picture, Question]:
    """A sample as a picture with a single question; what is drawn where is not known."""
    question = Question(sample.kind, sample.question, sample.answer)
    return Picture(sample.images, sample.video, (question,), ()), question


def _frame(pair: tuple[Image.Image, Image.Image], limits: tuple[int, int], count: int) -> Frame:
    width, height = pair[0].size
    new_height, new_width = _resized(height, width, limits, count)
    pixels = np.stack(
        [
            np.asarray(
                image
                if image.size == (new_width, new_height)
                else image.resize((new_width, new_height), Image.Resampling.BICUBIC),
                np.float32,
            )
            for image in pair
        ]
    )  # (2, H, W, 3)
    grid = (new_height // PATCH_SIZE, new_width // PATCH_SIZE)
    return Frame(
        _patches(pixels / 127.5 - 1.0, grid), grid, (new_width / width, new_height / height)
    )


def _patches(pixels: NDArray[np.float32], grid: tuple[int, int]) -> NDArray[np.float32]:
    height, width = grid
    blocks = pixels.reshape(
        2,
        height // MERGE_SIZE,
        MERGE_SIZE,
        PATCH_SIZE,
        width // MERGE_SIZE,
        MERGE_SIZE,
        PATCH_SIZE,
        3,
    )  # (frame, block row, row, y, block column, column, x, channel)
    ordered = blocks.transpose(1, 4, 2, 5, 7, 0, 3, 6)
    return np.ascontiguousarray(ordered.reshape(height * width, -1), np.float32)


def _resized(height: int, width: int, limits: tuple[int, int], count: int) -> tuple[int, int]:
    """Qwen's smart resize: multiples of 32 near the size, within the limits on all pixels."""
    low, high = limits
    new_height = max(FACTOR, round(height / FACTOR) * FACTOR)
    new_width = max(FACTOR, round(width / FACTOR) * FACTOR)
    if count * new_height * new_width > high:
        beta = float(np.sqrt(count * height * width / high))
        new_height = max(FACTOR, int(height / beta / FACTOR) * FACTOR)
        new_width = max(FACTOR, int(width / beta / FACTOR) * FACTOR)
    elif count * new_height * new_width < low:
        beta = float(np.sqrt(low / (count * height * width)))
        new_height = int(np.ceil(height * beta / FACTOR)) * FACTOR
        new_width = int(np.ceil(width * beta / FACTOR)) * FACTOR
    return new_height, new_width
