"""Direct lessons for the vision encoder, which are thrown away with their heads after training.

Answers alone teach shapes too slowly. So linear heads also have to name what lies under each
patch or visual token, each head where the answer should come from: colour at DeepStack level 0,
the direction of movement at level 1, shapes and digits at level 2 and in the two last blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from qwen3vl_tools.tiny.batching import sorted_frames
from qwen3vl_tools.tiny.drawing import COLORS, SHAPES, Thing
from qwen3vl_tools.tiny.encoding import FACTOR, MERGE_SIZE, PATCH_SIZE, Frame, Row
from qwen3vl_tools.tiny.forward import Features
from qwen3vl_tools.tiny.scenes import Picture

__all__ = ["Lessons", "Teacher", "lessons"]

_NAMES = (*SHAPES, *"0123456789")
_COLOR_NAMES = tuple(COLORS)
_DIRECTIONS = ("", "left", "right", "up", "down")
_MIN_SHARE = 0.2  # of the thing or of the visual token
_EMPTY_WEIGHT = 0.3
_STILL_WEIGHT = 0.02  # few tokens move at all


@dataclass(frozen=True)
class Lessons:
    """What the heads should say, in sorted frame order.

    Attributes:
        patch_names: (num_patches,) int64, index into the names + 1, 0 for background.
        names: (num_tokens, 13) float32, 1 for each thing in the visual token.
        colors: (num_tokens, 5) float32.
        motions: (num_tokens,) int64, 0 where nothing moves.
    """

    patch_names: Tensor
    names: Tensor
    colors: Tensor
    motions: Tensor


def lessons(pictures: Sequence[Picture], rows: Sequence[Row]) -> Lessons:
    """The lessons of a batch of pictures, whose rows will be collated."""
    parts = []
    for r, f in sorted_frames(rows):
        picture, frame = pictures[r], rows[r].frames[f]
        parts.append(_frame_lessons(frame, picture.things[f], picture.motion))
    patch_names, names, colors, motions = (
        torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True)
    )
    return Lessons(patch_names, names, colors, motions)


class Teacher(nn.Module):
    """The heads and their loss."""

    def __init__(self, vision_hidden: int, text_hidden: int) -> None:
        """Heads for hidden states of the encoder and for merged features."""
        super().__init__()
        self.patch_heads = nn.ModuleList(
            nn.Linear(vision_hidden, len(_NAMES) + 1) for _ in range(2)
        )
        self.color_head = nn.Linear(text_hidden, len(_COLOR_NAMES))
        self.motion_head = nn.Linear(text_hidden, len(_DIRECTIONS))
        self.name_head = nn.Linear(text_hidden, len(_NAMES))

    def forward(self, features: Features, lesson: Lessons) -> Tensor:
        """The sum of all heads' losses."""
        weight = torch.ones(len(_NAMES) + 1)
        weight[0] = _EMPTY_WEIGHT
        losses = [
            functional.cross_entropy(head(hidden), lesson.patch_names, weight)
            for head, hidden in zip(self.patch_heads, features.hidden[-2:], strict=True)
        ]
        names = self.name_head(features.levels[2])
        losses.append(functional.binary_cross_entropy_with_logits(names, lesson.names) * 5)
        colors, motions = self.color_head(features.levels[0]), self.motion_head(features.levels[1])
        losses.append(functional.binary_cross_entropy_with_logits(colors, lesson.colors) * 3)
        still = torch.ones(len(_DIRECTIONS))
        still[0] = _STILL_WEIGHT
        losses.append(functional.cross_entropy(motions, lesson.motions, still))
        return torch.stack(losses).sum()


def _frame_lessons(
    frame: Frame, things: Sequence[Thing], motion: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    height, width = frame.grid
    patch_names = np.zeros((height, width), np.int64)
    names = np.zeros((height // MERGE_SIZE, width // MERGE_SIZE, len(_NAMES)), np.float32)
    colors = np.zeros((*names.shape[:2], len(_COLOR_NAMES)), np.float32)
    motions = np.zeros(names.shape[:2], np.int64)
    for thing in things:
        box = np.array(thing.box) * np.tile(frame.scale, 2)
        name = _NAMES.index(thing.name)
        patch_names[_centers_inside(box, frame.grid)] = name + 1
        covered = _covered(box, names.shape[:2])
        names[covered, name] = 1
        if thing.color in COLORS:
            colors[covered, _COLOR_NAMES.index(thing.color)] = 1
        motions[covered] = _DIRECTIONS.index(motion)
    return (
        _block_order(patch_names),
        names.reshape(-1, len(_NAMES)),
        colors.reshape(-1, len(_COLOR_NAMES)),
        motions.reshape(-1),
    )


def _centers_inside(box: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    rows, columns = ((np.arange(n) + 0.5) * PATCH_SIZE for n in grid)
    inside_y = (rows > box[1]) & (rows < box[3])
    inside_x = (columns > box[0]) & (columns < box[2])
    return np.asarray(inside_y[:, None] & inside_x[None, :])


def _covered(box: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """Which visual tokens hold a good share of the box, or are largely filled by it."""
    edges_y, edges_x = (np.arange(n) * FACTOR for n in grid)
    down = np.clip(np.minimum(box[3], edges_y + FACTOR) - np.maximum(box[1], edges_y), 0, None)
    across = np.clip(np.minimum(box[2], edges_x + FACTOR) - np.maximum(box[0], edges_x), 0, None)
    overlap = down[:, None] * across[None, :]
    area = (box[2] - box[0]) * (box[3] - box[1])
    return np.asarray(overlap >= _MIN_SHARE * min(area, FACTOR**2))


def _block_order(values: np.ndarray) -> np.ndarray:
    height, width = values.shape
    blocks = values.reshape(height // MERGE_SIZE, MERGE_SIZE, width // MERGE_SIZE, MERGE_SIZE)
    return blocks.transpose(0, 2, 1, 3).reshape(-1)
