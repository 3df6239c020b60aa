"""Numbers that are absurdly large or small are refused where they are given, in one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen3vl_export.errors import CheckpointError, InputError
from qwen3vl_runtime.image_processor import ImageProcessorConfig, preprocess_image
from qwen3vl_runtime.limits import MAX_INTEGER, is_integer, is_real, positive_fps, shown
from qwen3vl_runtime.media import MAX_IMAGE_PIXELS, MAX_VIDEO_PIXELS, VideoFrames
from qwen3vl_runtime.messages import parse_messages
from qwen3vl_runtime.runner import RunnerOptions
from qwen3vl_runtime.sampling_params import GenerationDefaults, SamplingParams
from qwen3vl_runtime.video_processor import (
    VideoProcessorConfig,
    preprocess_video,
    sample_frame_indices,
)

HUGE = (10**400, 10**5000)


def test_what_counts_as_a_number_in_range() -> None:
    assert all(is_integer(value) for value in (1, np.int32(7), MAX_INTEGER))
    assert not any(is_integer(value) for value in (0, True, 1.0, MAX_INTEGER + 1, *HUGE, "1"))
    assert all(is_real(value, 0, 10) for value in (0, 10, 2.5, np.float16(0.5), np.int64(3)))
    outside = (-1, 10.1, True, float("nan"), float("inf"), np.float32("nan"), *HUGE, "1", None)
    assert not any(is_real(value, 0, 10) for value in outside)


def test_shown_is_short_whatever_the_value() -> None:
    assert shown(2.5) == "2.5"
    assert len(shown("x" * 1000)) < 80
    assert shown(10**5000).endswith("bits")
    assert shown([10**5000])


@pytest.mark.parametrize("value", [0, -1, 1e-320, 1e-7, 1e7, 1e308, *HUGE], ids=shown)
@pytest.mark.parametrize("key", ["fps", "raw_fps"])
def test_frame_rates_are_bounded(key: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{key} must be a number above zero, found"):
        parse_messages([{"role": "user", "content": [{"video": "x", key: value}]}])
    with pytest.raises(InputError, match="rate must be a number above zero, found"):
        positive_fps(value, "rate")


@pytest.mark.parametrize("value", [MAX_INTEGER + 1, *HUGE], ids=shown)
def test_counts_are_bounded(value: int) -> None:
    for key in ("min_pixels", "max_pixels", "num_frames"):
        with pytest.raises(InputError, match=f"{key} must be a positive integer"):
            parse_messages([{"role": "user", "content": [{"video": "x", key: value}]}])
    with pytest.raises(InputError, match="max_new_tokens must be"):
        SamplingParams(max_new_tokens=value)
    with pytest.raises(InputError, match="capacity must be"):
        RunnerOptions(capacity=value)


@pytest.mark.parametrize("value", HUGE, ids=shown)
def test_a_temperature_must_be_a_float(value: int) -> None:
    with pytest.raises(InputError, match="temperature must be"):
        SamplingParams(temperature=value)
    with pytest.raises(CheckpointError, match="temperature must be"):
        GenerationDefaults.from_dict({"temperature": value})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [ImageProcessorConfig, VideoProcessorConfig])
@pytest.mark.parametrize(
    "settings",
    [
        {"image_std": [1e-320] * 3},
        {"image_std": 1e300},
        {"image_mean": 1e300},
        {"image_mean": 10**400},
        {"rescale_factor": 1e-320},
        {"rescale_factor": 10**400},
        {"patch_size": 10**400},
        {"size": {"shortest_edge": 10**400, "longest_edge": 10**400}},
    ],
    ids=shown,
)
def test_processor_settings_are_bounded(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="the processor config must have"):
        kind.from_dict(settings)


@pytest.mark.parametrize("fps", [0, -1.0, 1e-320, 1e308, 10**400], ids=shown)
def test_the_fps_of_a_processor_file_is_bounded(fps: float) -> None:
    with pytest.raises(CheckpointError, match="processor config must have fps"):
        VideoProcessorConfig.from_dict({"fps": fps})


@pytest.mark.parametrize("pixels", [2 * MAX_VIDEO_PIXELS, 10**14, MAX_INTEGER])
def test_a_size_beyond_all_sense_is_refused_before_any_resizing(pixels: int) -> None:
    image = Image.new("RGB", (64, 64))
    limits = {"min_pixels": pixels, "max_pixels": pixels}
    with pytest.raises(InputError, match=f"at most {MAX_IMAGE_PIXELS} pixels, but"):
        preprocess_image(image, ImageProcessorConfig(), **limits)
    with pytest.raises(InputError, match=f"at most {MAX_VIDEO_PIXELS} pixels together"):
        preprocess_video(VideoFrames((image,) * 4, 2.0), VideoProcessorConfig(), **limits)


def test_a_limit_that_is_never_reached_may_be_large() -> None:
    image = Image.new("RGB", (64, 64))
    result = preprocess_image(image, ImageProcessorConfig(), max_pixels=MAX_INTEGER)
    assert result.grid_thw == (1, 4, 4)


def test_frames_may_be_repeated_but_not_without_end() -> None:
    config = VideoProcessorConfig()
    assert len(sample_frame_indices(8, 2.0, config, num_frames=20)) == 20
    assert len(sample_frame_indices(20_000, 2.0, config, num_frames=20_000)) == 20_000
    with pytest.raises(InputError, match="num_frames must be a positive integer"):
        sample_frame_indices(8, 2.0, config, num_frames=10**12)
