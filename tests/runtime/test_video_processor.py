"""Video preprocessing against transformers.

`Qwen3VLVideoProcessor` needs torchvision to be constructed, so its methods are called unbound on a
plain namespace, and the resize that it takes from torchvision (torch's antialiased uint8
interpolation) is called directly.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.image_processing_backends import TorchvisionBackend
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from qwen3vl_export.errors import InputError
from qwen3vl_runtime.image_processor import preprocess_image
from qwen3vl_runtime.media import VideoFrames
from qwen3vl_runtime.video_processor import (
    VideoProcessorConfig,
    frame_timestamps,
    preprocess_video,
    sample_frame_indices,
    smart_resize_video,
)

# The lazy package attribute is a stub without torchvision; the module itself imports.
reference = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
PROCESSOR = reference.Qwen3VLVideoProcessor
SMALL = {"size": {"shortest_edge": 4096, "longest_edge": 60_000}}


def random_video(
    num_frames: int, width: int = 70, height: int = 50, fps: float = 8.0, seed: int = 0
) -> VideoFrames:
    pixels = np.random.default_rng(seed).integers(
        0, 256, (num_frames, height, width, 3), dtype=np.uint8
    )
    return VideoFrames(tuple(Image.fromarray(frame) for frame in pixels), fps)


def reference_pixels(video: VideoFrames, indices: list[int], size: tuple[int, int], config):
    """uint8 [frames, 3, height, width] resized by what torchvision calls on a CPU."""
    pixels = torch.stack(
        [torch.from_numpy(np.array(video.frames[i])).permute(2, 0, 1) for i in indices]
    )
    mode = {2: "bilinear", 3: "bicubic"}[config.resample]
    return torch.nn.functional.interpolate(pixels, size, mode=mode, antialias=True)


def reference_patches(pixels: torch.Tensor, config: VideoProcessorConfig):
    """Normalised patches of uint8 [frames, 3, height, width], and the grid."""
    mean, std, _ = TorchvisionBackend._fuse_mean_std_and_rescale_factor.__wrapped__(
        None,
        do_normalize=True,
        image_mean=list(config.image_mean),
        image_std=list(config.image_std),
        do_rescale=True,
        rescale_factor=config.rescale_factor,
    )
    normalised = pixels.float().sub(mean[:, None, None]).div_(std[:, None, None])
    patches, *grid = PROCESSOR.patchify(
        None, normalised[None], config.patch_size, config.merge_size, config.temporal_patch_size
    )
    return patches[0].numpy(), tuple(grid)


def bytes_of(pixel_values: np.ndarray, config: VideoProcessorConfig) -> np.ndarray:
    """Undo the normalisation: 0..255 again, [frames, patches, 3, values of one channel]."""
    values = pixel_values.reshape(*pixel_values.shape[:2], 3, -1)
    mean, std = (np.array(v)[:, None] for v in (config.image_mean, config.image_std))
    return np.round((values * std + mean) / config.rescale_factor)


@settings(max_examples=300, deadline=None)
@given(
    total=st.integers(1, 5000),
    raw_fps=st.floats(0.1, 240) | st.sampled_from([24, 25, 29.97, 30, 60]),
    fps=st.none() | st.floats(0.05, 60),
    num_frames=st.none() | st.integers(1, 900),
    config_fps=st.floats(0.1, 30),
    min_frames=st.integers(1, 10),
    max_frames=st.integers(1, 900),
)
def test_sampling_equals_reference(
    total, raw_fps, fps, num_frames, config_fps, min_frames, max_frames
):
    limits = {"fps": config_fps, "min_frames": min_frames, "max_frames": max_frames}
    config = VideoProcessorConfig.from_dict(limits)
    metadata = VideoMetadata(total_num_frames=total, fps=raw_fps)
    arguments = {"fps": fps, "num_frames": num_frames}
    try:
        expected = PROCESSOR.sample_frames(SimpleNamespace(**limits), metadata, **arguments)
    except ValueError:
        with pytest.raises(InputError, match="fps or num_frames, not both"):
            sample_frame_indices(total, raw_fps, config, **arguments)
    else:
        actual = sample_frame_indices(total, raw_fps, config, **arguments)
        assert actual.dtype == np.int64
        np.testing.assert_array_equal(actual, expected)


@settings(max_examples=200, deadline=None)
@given(
    indices=st.lists(st.integers(0, 100_000), min_size=1, max_size=30).map(sorted),
    raw_fps=st.floats(0.1, 240),
    temporal_patch_size=st.integers(1, 4),
)
def test_timestamps_equal_reference(indices, raw_fps, temporal_patch_size):
    expected = Qwen3VLProcessor._calculate_timestamps(
        None, list(indices), raw_fps, temporal_patch_size
    )
    assert frame_timestamps(indices, raw_fps, temporal_patch_size) == tuple(expected)
    assert frame_timestamps(np.array(indices), raw_fps, temporal_patch_size) == tuple(expected)


@settings(max_examples=400, deadline=None)
@given(
    num_frames=st.integers(1, 800),
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    temporal_factor=st.integers(1, 4),
    factor=st.sampled_from([2, 28, 32, 48]),
    min_pixels=st.integers(1, 3_000_000),
    extra_pixels=st.integers(0, 30_000_000),
)
def test_smart_resize_equals_reference(
    num_frames, height, width, temporal_factor, factor, min_pixels, extra_pixels
):
    limits = (min_pixels, min_pixels + extra_pixels)
    arguments = (num_frames, height, width, temporal_factor, factor, *limits)
    try:
        expected = reference.smart_resize(*arguments)
    except ValueError:
        with pytest.raises(InputError, match=r"at least|200 times"):
            smart_resize_video(*arguments)
    else:
        assert smart_resize_video(*arguments) == expected


@settings(max_examples=40, deadline=None)
@given(
    num_frames=st.integers(2, 9),
    width=st.integers(10, 150),
    height=st.integers(10, 150),
    patch_size=st.sampled_from([14, 16]),
    merge_size=st.integers(1, 3),
    temporal_patch_size=st.integers(1, 3),
    resample=st.sampled_from([2, 3]),
    image_mean=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    image_std=st.lists(st.floats(0.1, 1), min_size=3, max_size=3),
    longest_edge=st.integers(4096, 120_000),
)
def test_whole_video_equals_reference(num_frames, width, height, longest_edge, **config_dict):
    size = {"shortest_edge": 4096, "longest_edge": longest_edge}
    config = VideoProcessorConfig.from_dict({**config_dict, "size": size})
    num_frames = max(num_frames, config.temporal_patch_size)
    video = random_video(num_frames, width, height)
    ours = preprocess_video(video, config, do_sample_frames=False)
    resized = reference.smart_resize(
        num_frames,
        height,
        width,
        config.temporal_patch_size,
        config.patch_size * config.merge_size,
        4096,
        longest_edge,
    )
    pixels = reference_pixels(video, list(range(num_frames)), resized, config)
    expected, grid = reference_patches(pixels, config)
    assert ours.grid_thw == grid
    assert ours.pixel_values.dtype == np.float32
    expected = expected.reshape(ours.pixel_values.shape)
    levels = np.abs(bytes_of(ours.pixel_values, config) - bytes_of(expected, config))
    # Pillow and torch round their 8-bit filters differently: see the docstring of the module.
    assert levels.max() <= 2
    same = (levels == 0).reshape(expected.shape)
    # Measured over 1500 random sizes: at worst 0.990 bicubic and 0.937 bilinear.
    assert same.mean() > {3: 0.98, 2: 0.85}[config.resample]
    np.testing.assert_array_equal(ours.pixel_values[same], expected[same])


@settings(max_examples=30, deadline=None)
@given(
    num_frames=st.integers(2, 7),
    grid=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    temporal_patch_size=st.integers(1, 3),
    merge_size=st.integers(1, 3),
    image_mean=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    image_std=st.lists(st.floats(0.1, 1), min_size=3, max_size=3),
)
@example(  # the last temporal patch holds two of its three frames
    num_frames=5,
    grid=(1, 2),
    temporal_patch_size=3,
    merge_size=2,
    image_mean=[0.5] * 3,
    image_std=[0.5] * 3,
)
def test_patches_are_bit_equal_where_nothing_is_resized(num_frames, grid, **config_dict):
    side = 8 * config_dict["merge_size"]
    size = {"shortest_edge": 1, "longest_edge": 10_000_000}
    config = VideoProcessorConfig.from_dict({**config_dict, "patch_size": 8, "size": size})
    num_frames = max(num_frames, config.temporal_patch_size)
    video = random_video(num_frames, grid[0] * side, grid[1] * side)
    ours = preprocess_video(video, config, do_sample_frames=False)
    pixels = torch.stack([torch.from_numpy(np.array(f)).permute(2, 0, 1) for f in video.frames])
    expected, expected_grid = reference_patches(pixels, config)
    assert ours.grid_thw == expected_grid
    np.testing.assert_array_equal(ours.pixel_values.reshape(expected.shape), expected)


@settings(max_examples=60, deadline=None)
@given(
    num_frames=st.integers(2, 40),
    width=st.integers(16, 200),
    height=st.integers(16, 200),
    longest_edge=st.integers(8192, 400_000),
    max_video_tokens=st.integers(1, 60),
    cap=st.booleans(),
)
def test_patch_count_equals_reference(num_frames, width, height, longest_edge, **cap_options):
    size = {"shortest_edge": 4096, "longest_edge": longest_edge}
    cap_options["cap_pixels_per_frame"] = cap_options.pop("cap")
    config = VideoProcessorConfig.from_dict({"size": size, **cap_options})
    namespace = SimpleNamespace(
        size=size, patch_size=16, merge_size=2, temporal_patch_size=2, **cap_options
    )
    expected = PROCESSOR.get_num_of_video_patches(namespace, num_frames, height, width)
    video = VideoFrames((Image.new("RGB", (width, height)),) * num_frames, 8.0)
    grid = preprocess_video(video, config, do_sample_frames=False).grid_thw
    assert grid[0] * grid[1] * grid[2] == expected


def test_sampled_frames_keep_their_order_and_times():
    config = VideoProcessorConfig.from_dict({**SMALL, "fps": 2, "max_frames": 5})
    frames = tuple(Image.new("RGB", (64, 64), (i, 0, 0)) for i in range(41))
    ours = preprocess_video(VideoFrames(frames, 10.0), config)
    red = bytes_of(ours.pixel_values, config)[:, 0, 0].reshape(3, 2, -1)[:, :, 0]
    assert red.tolist() == [[0, 10], [20, 30], [40, 40]]
    assert ours.timestamps == (0.5, 2.5, 4.0)


def test_video_of_one_frame_is_padded_to_a_temporal_patch():
    config = VideoProcessorConfig.from_dict(SMALL)
    frame = random_video(1, 64, 64).frames[0]
    one = preprocess_video(VideoFrames((frame,), 4.0), config)
    two = preprocess_video(VideoFrames((frame, frame), 4.0), config, do_sample_frames=False)
    assert one.grid_thw == two.grid_thw
    assert one.grid_thw[0] == 1
    assert one.timestamps == (0.0,)
    np.testing.assert_array_equal(one.pixel_values, two.pixel_values)
    still = preprocess_image(frame, config, min_pixels=64 * 64, max_pixels=64 * 64)
    np.testing.assert_allclose(one.pixel_values, still.pixel_values, atol=1e-6)


def test_call_parameters_replace_the_config():
    config = VideoProcessorConfig.from_dict({**SMALL, "fps": 2})
    video = random_video(32)
    assert preprocess_video(video, config).grid_thw[0] == 4
    assert preprocess_video(video, config, fps=4).grid_thw[0] == 8
    assert preprocess_video(video, config, num_frames=6).grid_thw[0] == 3
    assert preprocess_video(video, config, do_sample_frames=False).grid_thw[0] == 16
    smaller = preprocess_video(video, config, num_frames=6, max_pixels=7000)
    assert smaller.grid_thw == (3, 2, 2)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"fps": 2, "num_frames": 4}, "fps or num_frames, not both"),
        ({"fps": 0}, "fps must be a number above zero, found 0"),
        ({"fps": float("nan")}, "fps must be a number above zero"),
        ({"num_frames": 0}, "num_frames must be a positive integer, found 0"),
        ({"num_frames": 2.0}, "num_frames must be a positive integer"),
        ({"do_sample_frames": False, "fps": 2}, "do_sample_frames is false"),
        ({"max_pixels": 10}, "exceeds max_pixels 10"),
    ],
)
def test_contradictory_parameters_are_refused(parameters, message):
    with pytest.raises(InputError, match=message):
        preprocess_video(random_video(8), VideoProcessorConfig.from_dict(SMALL), **parameters)


def test_elongated_video_is_refused():
    with pytest.raises(InputError, match="200 times"):
        preprocess_video(random_video(2, 5000, 1), VideoProcessorConfig())
    assert preprocess_video(random_video(2, 1, 1), VideoProcessorConfig()).grid_thw[0] == 1
