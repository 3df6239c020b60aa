"""Image preprocessing against transformers' Pillow processor, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as reference

from qwen3vl_export.errors import CheckpointError, InputError, UnsupportedModelError
from qwen3vl_runtime.image_processor import (
    ImageProcessorConfig,
    preprocess_image,
    smart_resize,
)

QWEN3_VL = {
    "patch_size": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 4096, "longest_edge": 65536},
}


def random_image(width: int, height: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def assert_equals_reference(image: Image.Image, config: dict[str, object]) -> None:
    ours = preprocess_image(image, ImageProcessorConfig.from_dict(config))
    theirs = reference.Qwen2VLImageProcessorPil(**config)(image, return_tensors="np")
    assert ours.grid_thw == tuple(theirs["image_grid_thw"][0].tolist())
    assert ours.pixel_values.dtype == np.float32
    assert ours.pixel_values.shape[0] == 1
    assert ours.timestamps is None
    np.testing.assert_array_equal(ours.pixel_values[0], theirs["pixel_values"])


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    min_pixels=st.integers(1, 60_000),
    extra_pixels=st.integers(0, 200_000),
    patch_size=st.sampled_from([2, 14, 16]),
    temporal_patch_size=st.integers(1, 3),
    merge_size=st.integers(1, 3),
    resample=st.sampled_from([int(filter_) for filter_ in Image.Resampling]),
    image_mean=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    image_std=st.lists(st.floats(0.1, 1), min_size=3, max_size=3),
    seed=st.integers(0, 9),
)
def test_patches_are_bit_equal(width, height, min_pixels, extra_pixels, seed, **config):
    if max(width, height) > 200 * min(width, height):
        width = height
    size = {"shortest_edge": min_pixels, "longest_edge": min_pixels + extra_pixels}
    assert_equals_reference(random_image(width, height, seed), {**config, "size": size})


@pytest.mark.parametrize(
    "config", [{}, QWEN3_VL, {**QWEN3_VL, "size": None, "min_pixels": 5000, "max_pixels": 9000}]
)
@pytest.mark.parametrize("size", [(1, 1), (1, 200), (641, 480), (31, 999), (64, 64)])
def test_whole_configs_and_extreme_sizes_are_bit_equal(config, size):
    assert_equals_reference(random_image(*size), config)


def test_every_byte_value_is_normalised_exactly():
    ramp = np.arange(256, dtype=np.uint8).repeat(4).reshape(32, 32)
    assert_equals_reference(Image.fromarray(np.stack([ramp, ramp.T, 255 - ramp], axis=2)), {})


@settings(max_examples=400, deadline=None)
@given(
    height=st.integers(1, 9000),
    width=st.integers(1, 9000),
    factor=st.sampled_from([1, 2, 28, 32]),
    min_pixels=st.integers(1, 2_000_000),
    extra_pixels=st.integers(0, 4_000_000),
)
def test_smart_resize_equals_reference(height, width, factor, min_pixels, extra_pixels):
    arguments = (height, width, factor, min_pixels, min_pixels + extra_pixels)
    try:
        expected = reference.smart_resize(*arguments)
    except ValueError:
        with pytest.raises(InputError, match="200 times"):
            smart_resize(*arguments)
    else:
        assert smart_resize(*arguments) == expected


def test_elongated_image_is_refused():
    config = ImageProcessorConfig.from_dict(QWEN3_VL)
    for size in ((1, 5000), (5000, 1), (201, 1)):
        with pytest.raises(InputError, match=f"{size[0]}x{size[1]}"):
            preprocess_image(random_image(*size), config)


def test_pixel_limits_of_a_call_replace_those_of_the_config():
    config = ImageProcessorConfig.from_dict(QWEN3_VL)
    image = random_image(300, 200)
    ours = preprocess_image(image, config, min_pixels=1024, max_pixels=9000)
    assert_equals_reference(
        image, {**QWEN3_VL, "size": {"shortest_edge": 1024, "longest_edge": 9000}}
    )
    assert ours.grid_thw != preprocess_image(image, config).grid_thw
    for limits in ({"min_pixels": 0}, {"max_pixels": 1.5}, {"max_pixels": True}):
        with pytest.raises(InputError, match="positive integer"):
            preprocess_image(image, config, **limits)
    with pytest.raises(InputError, match="min_pixels 4096 exceeds max_pixels 100"):
        preprocess_image(image, config, max_pixels=100)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_only_rgb_is_taken(mode):
    with pytest.raises(InputError, match=f"found mode '{mode}'"):
        preprocess_image(Image.new(mode, (40, 40)), ImageProcessorConfig())


def test_defaults_equal_reference():
    theirs = reference.Qwen2VLImageProcessorPil()
    ours = ImageProcessorConfig.from_dict({"image_processor_type": "Qwen2VLImageProcessorFast"})
    assert ours == ImageProcessorConfig()
    for name in ("patch_size", "temporal_patch_size", "merge_size", "rescale_factor"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.resample == int(theirs.resample)
    assert list(ours.image_mean) == list(theirs.image_mean)
    assert list(ours.image_std) == list(theirs.image_std)
    assert ours.min_pixels == theirs.size["shortest_edge"]
    assert ours.max_pixels == theirs.size["longest_edge"]


def test_null_values_take_the_default_and_unknown_keys_are_ignored():
    nulls = {"patch_size": None, "do_resize": None, "size": None, "image_mean": None}
    assert ImageProcessorConfig.from_dict({**nulls, "crop_size": 3}) == ImageProcessorConfig()


def test_top_level_limits_win_over_size_as_in_reference():
    config = {"min_pixels": 100_000, "size": {"shortest_edge": 5, "longest_edge": 200_000}}
    ours = ImageProcessorConfig.from_dict(config)
    theirs = reference.Qwen2VLImageProcessorPil(**json.loads(json.dumps(config)))
    assert ours.min_pixels == theirs.size["shortest_edge"] == 100_000
    assert ours.max_pixels == theirs.size["longest_edge"] == 200_000


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"do_resize": False}, UnsupportedModelError, "do_resize=false"),
        ({"do_rescale": False}, UnsupportedModelError, "do_rescale=false"),
        ({"do_normalize": False}, UnsupportedModelError, "do_normalize=false"),
        ({"do_convert_rgb": False}, UnsupportedModelError, "do_convert_rgb=false"),
        ({"resample": 17}, UnsupportedModelError, "resample=17"),
        ({"do_resize": "yes"}, CheckpointError, "do_resize of type bool, found 'yes'"),
        ({"patch_size": 0}, CheckpointError, "positive patch_size, found 0"),
        ({"patch_size": "16"}, CheckpointError, "patch_size of type int, found '16'"),
        ({"merge_size": True}, CheckpointError, "merge_size of type int, found True"),
        ({"rescale_factor": float("nan")}, CheckpointError, "rescale_factor"),
        ({"rescale_factor": 0.0}, CheckpointError, "positive rescale_factor"),
        ({"image_mean": [0.5, 0.5]}, CheckpointError, "image_mean as three numbers"),
        ({"image_std": [0.5, 0, 0.5]}, CheckpointError, "image_std"),
        ({"size": {"height": 3, "width": 4}}, CheckpointError, "shortest_edge and longest_edge"),
        ({"size": {"shortest_edge": 3}}, CheckpointError, "shortest_edge and longest_edge"),
        ({"size": 448}, CheckpointError, "size as an object, found 448"),
        ({"min_pixels": 0}, CheckpointError, "positive shortest_edge"),
    ],
)
def test_unusable_configs_are_refused_by_name(config, error, message):
    with pytest.raises(error, match=message):
        ImageProcessorConfig.from_dict(config)


def test_config_file_saved_by_reference_is_read_back(tmp_path: Path):
    reference.Qwen2VLImageProcessorPil(**QWEN3_VL).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert ImageProcessorConfig.from_dict(saved) == ImageProcessorConfig.from_dict(QWEN3_VL)
