"""Positions of decoder and vision encoder against transformers' own functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLModel,
    Qwen3VLVisionRotaryEmbedding,
)
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from qwen3vl_export.config import VisionConfig
from qwen3vl_export.errors import InputError
from qwen3vl_runtime.positions import (
    RopeIndex,
    batch_position_ids,
    decode_position_ids,
    rope_index,
    vision_positions,
)

Grid = tuple[int, int, int]
# One sequence as (token types, image grids, video grids).
Sequence3 = tuple[list[int], list[Grid], list[Grid]]


def hf_model(merge_size: int) -> Qwen3VLModel:
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "vocab_size": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 1, 1],
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
            "spatial_merge_size": merge_size,
        },
    )
    return Qwen3VLModel(config)


@pytest.fixture(scope="module")
def models() -> dict[int, Qwen3VLModel]:
    return {merge_size: hf_model(merge_size) for merge_size in (1, 2, 3)}


@st.composite
def sequences(draw: st.DrawFn, merge_size: int) -> Sequence3:
    """Text and visuals in any mix; between two visuals there is text, as in every prompt."""
    side = st.integers(1, 5).map(lambda n: n * merge_size)
    types: list[int] = [0] * draw(st.integers(0, 3))
    images: list[Grid] = []
    films: list[Grid] = []
    for kind in draw(st.lists(st.sampled_from(["image", "video"]), max_size=4)):
        t, h, w = draw(st.integers(1, 3)), draw(side), draw(side)
        span = h * w // merge_size**2
        if kind == "image":
            images.append((t, h, w))
            types += [1] * (t * span) + [0] * draw(st.integers(1, 4))
        else:
            films.append((t, h, w))
            for _ in range(t):
                types += [2] * span + [0] * draw(st.integers(1, 4))
    while draw(st.booleans()) and types and types[-1] == 0:
        types.pop()  # a sequence may end with a visual, whose positions then decide the delta
    return types or [0], images, films


def hf_rope_index(
    model: Qwen3VLModel, batch: list[Sequence3]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    longest = max(len(types) for types, _, _ in batch)
    padded = torch.tensor([types + [0] * (longest - len(types)) for types, _, _ in batch])
    mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t, _, _ in batch])
    images = [grid for _, grids, _ in batch for grid in grids]
    films = [grid for _, _, grids in batch for grid in grids]
    position_ids, deltas = model.get_rope_index(
        torch.ones_like(padded),
        mm_token_type_ids=padded,
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(films) if films else None,
        attention_mask=mask,
    )
    return position_ids.numpy(), deltas[:, 0].numpy()


@settings(max_examples=80, deadline=None)
@given(data=st.data(), merge_size=st.sampled_from([1, 2, 3]))
def test_rope_index_and_batching_equal_transformers(
    models: dict[int, Qwen3VLModel], data: st.DataObject, merge_size: int
) -> None:
    batch = data.draw(st.lists(sequences(merge_size), min_size=1, max_size=3))
    results = [
        rope_index(np.array(types), images, films, merge_size) for types, images, films in batch
    ]
    for (types, _, _), result in zip(batch, results, strict=True):
        assert result.position_ids.shape == (3, len(types))
        assert result.position_ids.dtype == np.int64
    expected_ids, expected_deltas = hf_rope_index(models[merge_size], batch)
    np.testing.assert_array_equal(batch_position_ids(results), expected_ids)
    assert [result.rope_delta for result in results] == expected_deltas.tolist()


def test_delta_counts_every_axis(models: dict[int, Qwen3VLModel]) -> None:
    for grid in ((5, 2, 2), (1, 8, 2), (1, 2, 8)):  # t, h or w reaches farthest
        sequence: Sequence3 = ([0, *[1] * (grid[0] * grid[1] * grid[2] // 4)], [grid], [])
        result = rope_index(np.array(sequence[0]), [grid], [], 2)
        assert result.rope_delta == hf_rope_index(models[2], [sequence])[1][0]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), num_tokens=st.integers(1, 3))
def test_decode_positions_equal_transformers(
    models: dict[int, Qwen3VLModel], data: st.DataObject, num_tokens: int
) -> None:
    types, images, films = data.draw(sequences(2))
    result = rope_index(np.array(types), images, films, 2)
    model = models[2]
    model.rope_deltas = torch.tensor([[result.rope_delta]])
    expected = model.compute_3d_position_ids(
        input_ids=None,
        inputs_embeds=torch.zeros(1, num_tokens, 16),
        cache=SimpleNamespace(get_seq_length=lambda: len(types)),
    )
    actual = decode_position_ids([len(types)], [result.rope_delta], num_tokens)
    assert actual.dtype == np.int64
    np.testing.assert_array_equal(actual, expected.numpy())


def test_decode_positions_of_a_batch() -> None:
    positions = decode_position_ids(np.array([5, 9]), np.array([-2, 0]), 2)
    assert positions.tolist() == [[[3, 4], [9, 10]]] * 3


@pytest.mark.parametrize(
    ("types", "images", "films", "named"),
    [
        ([], [], [], "non-empty"),
        ([0, 1, 0], [], [], "more than 0 image spans"),
        ([0, 0], [(1, 2, 2)], [], "0 image spans, but the grids ask for 1"),
        ([0, 2, 0], [], [(2, 2, 2)], "1 video spans, but the grids ask for 2"),
        ([0, 1, 1, 0], [(1, 2, 2)], [], "has 2 placeholders, but its grid (1, 2, 2) needs 1"),
        ([1, 1], [(1, 2, 2)] * 2, [], "must have text between them"),
        ([0, 3], [], [], "0, 1 or 2, found 3"),
    ],
)
def test_rope_index_refusals(
    types: list[int], images: list[Grid], films: list[Grid], named: str
) -> None:
    with pytest.raises(InputError) as caught:
        rope_index(np.array(types, np.int64), images, films, 2)
    assert named in str(caught.value)


def test_empty_batch_is_refused() -> None:
    with pytest.raises(InputError, match="at least one sequence"):
        batch_position_ids([])


def test_pads_are_zero_and_rows_independent() -> None:
    short = rope_index(np.zeros(2, np.int64), [], [], 2)
    long = RopeIndex(np.full((3, 4), 7, np.int64), 0)
    stacked = batch_position_ids([short, long])
    assert stacked[:, 0].tolist() == [[0, 1, 0, 0]] * 3
    assert (stacked[:, 1] == 7).all()


def vision_config(
    *, side: int = 48, merge_size: int = 2, head_dim: int = 64, rope_theta: float = 10000.0
) -> VisionConfig:
    return VisionConfig(
        depth=1,
        hidden_size=2 * head_dim,
        intermediate_size=8,
        num_heads=2,
        in_channels=3,
        patch_size=16,
        temporal_patch_size=2,
        spatial_merge_size=merge_size,
        out_hidden_size=8,
        num_position_embeddings=side**2,
        deepstack_visual_indexes=(),
        hidden_act="gelu_pytorch_tanh",
        rope_theta=rope_theta,
    )


def hf_rotary(config: VisionConfig) -> Qwen3VLVisionRotaryEmbedding:
    hf_config = Qwen3VLConfig(
        vision_config={
            "hidden_size": config.hidden_size,
            "num_heads": config.num_heads,
            "rope_parameters": {"rope_type": "axial", "rope_theta": config.rope_theta},
        }
    ).vision_config
    return Qwen3VLVisionRotaryEmbedding(hf_config)


GRIDS = st.tuples(st.integers(1, 70), st.integers(1, 70))
# Where (size - 1) divides multiples of (side - 1), a position falls exactly on a table entry and
# rounding decides on which side of it the floor lies.
TIES = st.sampled_from([(48, 48), (1, 1), (2, 95), (16, 24), (95, 48), (24, 142)])


@settings(max_examples=60, deadline=None)
@given(
    blocks=GRIDS | TIES,
    merge_size=st.sampled_from([1, 2, 3]),
    side=st.sampled_from([1, 2, 16, 48]),
)
def test_interpolation_equals_transformers(
    blocks: tuple[int, int], merge_size: int, side: int
) -> None:
    grid_h, grid_w = (n - n % merge_size or merge_size for n in blocks)
    positions = vision_positions(grid_h, grid_w, vision_config(side=side, merge_size=merge_size))
    indices, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, grid_h, grid_w]]),
        num_grid_per_side=side,
        mode="bilinear",
        align_corners=True,
        spatial_merge_size=merge_size,
    )
    assert positions.pos_embed_indices.dtype == np.int64
    assert positions.pos_embed_weights.dtype == np.float32
    table = np.random.default_rng(0).standard_normal((side**2, 4))
    assert positions.pos_embed_indices.shape == (4, grid_h * grid_w)
    actual = (table[positions.pos_embed_indices] * positions.pos_embed_weights[..., None]).sum(0)
    expected = (table[indices.numpy()] * weights.double().numpy()[..., None]).sum(1)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(positions.pos_embed_weights.sum(0), 1.0, rtol=0, atol=1e-6)
    same_taps = positions.pos_embed_indices == indices.numpy().T  # the upper tap may be idle
    weight_error = np.abs(positions.pos_embed_weights - weights.numpy().T)
    assert weight_error[same_taps].max() <= 1e-7


@settings(max_examples=40, deadline=None)
@given(
    blocks=GRIDS | st.just((2, 512)),
    merge_size=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([8, 32, 64, 72]),
    rope_theta=st.sampled_from([10000.0, 500.0]),
)
def test_rotary_equals_transformers(
    blocks: tuple[int, int], merge_size: int, head_dim: int, rope_theta: float
) -> None:
    config = vision_config(merge_size=merge_size, head_dim=head_dim, rope_theta=rope_theta)
    grid_h, grid_w = (n - n % merge_size or merge_size for n in blocks)
    positions = vision_positions(grid_h, grid_w, config)
    position_ids = get_vision_position_ids(torch.tensor([[1, grid_h, grid_w]]), merge_size)
    cos, sin = (full.numpy() for full in hf_rotary(config)(torch.zeros(1), position_ids))
    half = head_dim // 2
    atol = max(2e-7, 1.8e-7 * max(grid_h, grid_w))
    for actual, full in ((positions.rotary_cos, cos), (positions.rotary_sin, sin)):
        assert actual.dtype == np.float32
        assert actual.shape == (grid_h * grid_w, half)
        np.testing.assert_allclose(actual, full[:, :half], rtol=0, atol=atol)
        np.testing.assert_allclose(actual, full[:, half:], rtol=0, atol=atol)


def test_vision_arrays_are_read_only() -> None:
    for array in vars(vision_positions(2, 4, vision_config())).values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("grid", [(0, 2), (3, 2), (2, 5), (2, -2)])
def test_bad_vision_grids_are_refused(grid: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="multiples of 2"):
        vision_positions(*grid, vision_config())
