"""Collates rows into one batch of tensors, with the vision frames sorted by size.

Frames with equally many patches lie side by side so that vision attention can take each size in
one call; `visual_order` leads from there back to the order of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from qwen3vl_tools.tiny.encoding import IGNORED, Row

__all__ = ["Batch", "collate", "sorted_frames"]

_MERGE_UNIT = 4  # patches in one visual token


@dataclass(frozen=True)
class Batch:
    """One batch.

    Attributes:
        pixels: (num_patches, 1536) float32, in sorted frame order.
        grids: (grid_h, grid_w) of every frame, in sorted order.
        groups: (frames, patches a frame) of each run of equally large frames.
        visual_order: (num_visual_tokens,) int64; sorted tokens -> token order.
        input_ids: (batch, length) int64, padded with 0.
        position_ids: (3, batch, length) int64.
        mask: (batch, 1, length, length) bool; True where attention may look.
        is_visual: (batch, length) bool.
        labels: (batch, length) int64.
        weights: (batch, length) float32; how much each label counts.
    """

    pixels: Tensor
    grids: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, int], ...]
    visual_order: Tensor
    input_ids: Tensor
    position_ids: Tensor
    mask: Tensor
    is_visual: Tensor
    labels: Tensor
    weights: Tensor


def sorted_frames(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """(row, frame) of all frames, sorted by the number of patches."""
    numbers = [(r, f) for r, row in enumerate(rows) for f in range(len(row.frames))]
    return sorted(numbers, key=lambda n: len(rows[n[0]].frames[n[1]].patches))


def collate(rows: Sequence[Row], visual_ids: Sequence[int]) -> Batch:
    """Pads the rows to one length; `visual_ids` are the image and the video placeholder."""
    order = sorted_frames(rows)
    frames = [rows[r].frames[f] for r, f in order]
    length = max(len(row.input_ids) for row in rows)
    input_ids = np.zeros((len(rows), length), np.int64)
    labels = np.full((len(rows), length), IGNORED, np.int64)
    weights = np.zeros((len(rows), length), np.float32)
    position_ids = np.zeros((3, len(rows), length), np.int64)
    branches = np.full((len(rows), length), -1, np.int64)
    for index, row in enumerate(rows):
        size = len(row.input_ids)
        input_ids[index, :size] = row.input_ids
        labels[index, :size] = row.labels
        weights[index, :size] = row.weights
        position_ids[:, index, :size] = row.position_ids
        branches[index, :size] = row.branches
    counts = [len(frame.patches) for frame in frames]
    return Batch(
        torch.from_numpy(np.concatenate([frame.patches for frame in frames])),
        tuple(frame.grid for frame in frames),
        tuple((len(list(group)), count) for count, group in groupby(counts)),
        _visual_order(order, counts),
        torch.from_numpy(input_ids),
        torch.from_numpy(position_ids),
        torch.from_numpy(_mask(branches))[:, None],
        torch.from_numpy(np.isin(input_ids, visual_ids)),
        torch.from_numpy(labels),
        torch.from_numpy(weights),
    )


def _visual_order(order: list[tuple[int, int]], counts: list[int]) -> Tensor:
    tokens = np.array(counts) // _MERGE_UNIT
    starts = np.concatenate([[0], np.cumsum(tokens)])
    in_token_order = sorted(range(len(order)), key=order.__getitem__)
    return torch.from_numpy(
        np.concatenate([np.arange(starts[i], starts[i + 1]) for i in in_token_order])
    )


def _mask(branches: np.ndarray) -> np.ndarray:
    """(batch, length, length): causal, and within one's own branch or the shared part."""
    length = branches.shape[1]
    asks, seen = branches[:, :, None], branches[:, None, :]
    may_look = np.tri(length, dtype=bool) & ((seen == asks) | (seen == 0))
    # Padding looks at itself, so that no row of the softmax is empty.
    return np.asarray(may_look | np.eye(length, dtype=bool))
