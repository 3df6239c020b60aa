"""Where tokens and patches stand: M-RoPE positions of the decoder, positions of the vision encoder.

Numpy only, and nothing but arithmetic on grids: pixels, embeddings and token ids stay outside.
The reference is transformers' `models/qwen3_vl/modeling_qwen3_vl.py` and `vision_utils.py`; in
Qwen3-VL a video is a sequence of separate temporal patches with their timestamps as text between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qwen3vl_export.config import VisionConfig
from qwen3vl_export.errors import InputError

__all__ = [
    "RopeIndex",
    "VisionPositions",
    "batch_position_ids",
    "decode_position_ids",
    "rope_index",
    "vision_positions",
]

Grid = tuple[int, int, int]

_TEXT, _IMAGE, _VIDEO = 0, 1, 2


class RopeIndex(NamedTuple):
    """M-RoPE positions of one sequence.

    Attributes:
        position_ids: int64 [3, seq]; axes temporal, height, width.
        rope_delta: Highest position + 1 - seq; a later token stands at its index plus this.
    """

    position_ids: NDArray[np.int64]
    rope_delta: int


def rope_index(
    token_types: NDArray[np.integer],
    image_grids: Sequence[Grid],
    video_grids: Sequence[Grid],
    merge_size: int,
) -> RopeIndex:
    """M-RoPE positions of one unpadded sequence, as `Qwen3VLModel.get_rope_index`.

    Text counts up on all three axes. A visual span that starts at position `p` takes
    (p + t, p + row, p + column) on the merged grid, and what follows goes on at
    `p + max(h, w) / merge_size`.

    Args:
        token_types: Integers [seq]; 0 text, 1 image, 2 video.
        image_grids: (t, h, w) of each image in patches, in order.
        video_grids: (t, h, w) of each video in patches, in order; each of its t temporal patches
            is a span of its own.
        merge_size: Side of the square of patches that merge into one visual token.

    Raises:
        InputError: The sequence is empty, or its visual spans do not fit the grids (which would
            give positions that are wrong without a sign of it).
    """
    if token_types.ndim != 1 or len(token_types) == 0:
        raise InputError(
            f"expected token types of one non-empty sequence, found shape {token_types.shape}"
        )
    grids = {
        _IMAGE: list(image_grids),
        _VIDEO: [(1, h, w) for t, h, w in video_grids for _ in range(t)],
    }
    used = {_IMAGE: 0, _VIDEO: 0}
    blocks: list[NDArray[np.int64]] = []
    position = 0
    for token_type, length in _runs(token_types):
        if token_type == _TEXT:
            blocks.append(np.tile(np.arange(position, position + length), (3, 1)))  # [3, length]
            position += length
            continue
        grid = _next_grid(grids, used, token_type, length, merge_size)
        blocks.append(position + _grid_positions(grid, merge_size))
        position += max(grid[1], grid[2]) // merge_size
    for token_type, name in ((_IMAGE, "image"), (_VIDEO, "video")):
        if used[token_type] != len(grids[token_type]):
            raise InputError(
                f"the prompt has {used[token_type]} {name} spans, but the grids ask for "
                f"{len(grids[token_type])}; give exactly the visuals of the prompt"
            )
    position_ids = np.concatenate(blocks, axis=1)  # [3, seq]
    return RopeIndex(position_ids, int(position_ids.max()) + 1 - len(token_types))


def batch_position_ids(sequences: Sequence[RopeIndex]) -> NDArray[np.int64]:
    """Stack sequences of different lengths, padded on the right.

    Pads get position 0, as in transformers under an attention mask. Any value is safe: a pad's
    key is masked until the sequence itself overwrites it, and its output is not read.

    Returns:
        int64 [3, batch, max_seq].

    Raises:
        InputError: There is no sequence.
    """
    if not sequences:
        raise InputError("expected at least one sequence to batch, found none")
    longest = max(sequence.position_ids.shape[1] for sequence in sequences)
    position_ids = np.zeros((3, len(sequences), longest), dtype=np.int64)
    for row, sequence in enumerate(sequences):
        position_ids[:, row, : sequence.position_ids.shape[1]] = sequence.position_ids
    return position_ids


def decode_position_ids(
    cached_lengths: Sequence[int] | NDArray[np.integer],
    rope_deltas: Sequence[int] | NDArray[np.integer],
    num_tokens: int = 1,
) -> NDArray[np.int64]:
    """Positions of text tokens that follow what is cached: index + rope_delta on all three axes.

    Args:
        cached_lengths: [batch], tokens already in each row's cache.
        rope_deltas: [batch], from `rope_index`.
        num_tokens: New tokens per row.

    Returns:
        int64 [3, batch, num_tokens].
    """
    starts = np.asarray(cached_lengths, np.int64) + np.asarray(rope_deltas, np.int64)  # [batch]
    positions = starts[:, None] + np.arange(num_tokens, dtype=np.int64)  # [batch, num_tokens]
    return np.broadcast_to(positions, (3, *positions.shape)).copy()  # [3, batch, num_tokens]


@dataclass(frozen=True, eq=False)
class VisionPositions:
    """Position inputs of the vision graph for frames of one size; arrays are read-only.

    Patches are in merge order: the patches that merge into one visual token follow each other.

    Attributes:
        pos_embed_indices: int64 [4, patches], rows of the learned position table to blend.
        pos_embed_weights: float32 [4, patches], their bilinear weights; each column adds up to 1.
        rotary_cos: float32 [patches, head_dim / 2]; height frequencies, then width ones.
        rotary_sin: float32 [patches, head_dim / 2].
    """

    pos_embed_indices: NDArray[np.int64]
    pos_embed_weights: NDArray[np.float32]
    rotary_cos: NDArray[np.float32]
    rotary_sin: NDArray[np.float32]


def vision_positions(grid_h: int, grid_w: int, config: VisionConfig) -> VisionPositions:
    """Positions of the patches of one frame.

    Every step is done in float32 in the order of transformers' vision encoder, so that indices
    come out the same where a position falls on a table entry and rounding decides the floor.
    Weights differ from the reference by at most 1e-7. Cosines and sines differ by at most 2e-7, or
    by 1.8e-7 * max(grid_h, grid_w) on a machine where torch rounds a frequency the other way.

    Args:
        grid_h: Patches of the frame in height.
        grid_w: Patches in width.
        config: Shape of the vision encoder.

    Raises:
        InputError: The grid is not a positive multiple of the merge size.
    """
    merge = config.spatial_merge_size
    if grid_h < 1 or grid_w < 1 or grid_h % merge or grid_w % merge:
        raise InputError(
            f"expected a grid in positive multiples of {merge} patches, found {grid_h} x {grid_w}"
        )
    rows, columns = _merge_order(grid_h, grid_w, merge)
    indices, weights = _bilinear_taps(rows, columns, grid_h, grid_w, config.num_grid_per_side)
    angles = np.concatenate([_angles(rows, config), _angles(columns, config)], axis=1)
    positions = VisionPositions(indices, weights, np.cos(angles), np.sin(angles))
    for array in vars(positions).values():
        array.setflags(write=False)
    return positions


def _runs(token_types: NDArray[np.integer]) -> list[tuple[int, int]]:
    """(token type, length) of each run of equal token types."""
    starts = np.flatnonzero(np.diff(token_types, prepend=token_types[0] - 1))  # [runs]
    lengths = np.diff(starts, append=len(token_types))
    return [(int(token_types[s]), int(n)) for s, n in zip(starts, lengths, strict=True)]


def _next_grid(
    grids: dict[int, list[Grid]], used: dict[int, int], token_type: int, length: int, merge: int
) -> Grid:
    """The grid of the next visual span, after checking that its tokens are `length`."""
    if token_type not in grids:
        raise InputError(f"token types must be 0, 1 or 2, found {token_type}")
    name = "image" if token_type == _IMAGE else "video"
    index = used[token_type]
    if index >= len(grids[token_type]):
        raise InputError(
            f"the prompt has more than {index} {name} spans, but only {index} grids were given; "
            "give exactly the visuals of the prompt"
        )
    t, h, w = grids[token_type][index]
    num_tokens = t * (h // merge) * (w // merge)
    if num_tokens != length:
        raise InputError(
            f"{name} span {index} has {length} placeholders, but its grid {(t, h, w)} needs "
            f"{num_tokens}; two visuals must have text between them"
        )
    used[token_type] = index + 1
    return t, h, w


def _grid_positions(grid: Grid, merge_size: int) -> NDArray[np.int64]:
    """int64 [3, t * h * w / merge_size^2]: (t, row, column) of each visual token, row by row."""
    shape = (grid[0], grid[1] // merge_size, grid[2] // merge_size)
    return np.indices(shape, dtype=np.int64).reshape(3, -1)  # [3, t, h, w] -> [3, tokens]


def _merge_order(
    grid_h: int, grid_w: int, merge: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and column of each patch, int64 [patches], block of merge x merge after block."""
    grid = np.indices((grid_h, grid_w), dtype=np.int64)  # [2, grid_h, grid_w]
    blocks = grid.reshape(2, grid_h // merge, merge, grid_w // merge, merge)
    ordered = blocks.transpose(0, 1, 3, 2, 4).reshape(2, -1)  # [2, patches]
    return ordered[0], ordered[1]


def _bilinear_taps(
    rows: NDArray[np.int64], columns: NDArray[np.int64], grid_h: int, grid_w: int, side: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Indices and weights [4, patches] that resize a side x side table to the grid."""
    row_taps, row_weights = _axis_taps(rows, grid_h, side)  # [2, patches] each
    column_taps, column_weights = _axis_taps(columns, grid_w, side)
    indices = row_taps[:, None] * side + column_taps[None]  # [2, 2, patches]
    weights = row_weights[:, None] * column_weights[None]  # [2, 2, patches]
    return indices.reshape(4, -1), weights.reshape(4, -1)  # [4, patches]


def _axis_taps(
    index: NDArray[np.int64], size: int, side: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The two table entries around each position, [2, patches], and their weights.

    Corners align: position 0 is entry 0, position size - 1 is entry side - 1.
    """
    source = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    floor = np.floor(source)
    fraction = source - floor
    lower = floor.astype(np.int64)
    taps = np.stack([lower, np.minimum(lower + 1, side - 1)])  # [2, patches]
    return taps, np.stack([np.float32(1) - fraction, fraction])  # [2, patches]


def _angles(index: NDArray[np.int64], config: VisionConfig) -> NDArray[np.float32]:
    """Rotation angles float32 [patches, head_dim / 4] of one axis.

    Height and width each own half a head: frequency i is theta^(-2i / (head_dim / 2)).
    """
    axis_dim = config.head_dim // 2
    exponents = np.arange(0, axis_dim, 2, dtype=np.float32) / np.float32(axis_dim)
    # numpy's float32 power often rounds otherwise than torch's; a rounded float64 one does not.
    powers = (config.rope_theta ** exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / powers  # [head_dim / 4]
    return index.astype(np.float32)[:, None] * frequencies
