"""Parsing of `video_preprocessor_config.json` against transformers' class defaults."""

from __future__ import annotations

import importlib

import pytest

from qwen3vl_export.errors import CheckpointError, InputError, UnsupportedModelError
from qwen3vl_runtime.video_processor import VideoProcessorConfig, sample_frame_indices

# The lazy package attribute is a stub without torchvision; the module itself imports.
reference = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
PROCESSOR = reference.Qwen3VLVideoProcessor
SMALL = {"size": {"shortest_edge": 4096, "longest_edge": 60_000}}


def test_defaults_equal_reference():
    ours = VideoProcessorConfig.from_dict({"video_processor_type": "Qwen3VLVideoProcessor"})
    assert ours == VideoProcessorConfig()
    shared = "patch_size temporal_patch_size merge_size rescale_factor fps num_frames"
    for name in f"{shared} min_frames max_frames do_sample_frames max_video_tokens".split():
        assert getattr(ours, name) == getattr(PROCESSOR, name), name
    assert ours.resample == int(PROCESSOR.resample)
    assert list(ours.image_mean) == PROCESSOR.image_mean
    assert list(ours.image_std) == PROCESSOR.image_std
    assert (ours.min_pixels, ours.max_pixels) == tuple(PROCESSOR.size.values())
    assert ours.cap_pixels_per_frame is False


def test_num_frames_of_the_config_rules_where_it_names_no_fps():
    config = VideoProcessorConfig.from_dict({**SMALL, "num_frames": 6})
    assert len(sample_frame_indices(100, 10.0, config)) == 6
    assert len(sample_frame_indices(100, 10.0, config, fps=1)) == 10
    both = VideoProcessorConfig.from_dict({"num_frames": 6, "fps": 2})
    with pytest.raises(InputError, match="not both"):
        sample_frame_indices(100, 10.0, both)


def test_top_level_limits_are_ignored_aloud(caplog):
    config = VideoProcessorConfig.from_dict({**SMALL, "min_pixels": 1, "max_pixels": 2})
    assert (config.min_pixels, config.max_pixels) == (4096, 60_000)
    assert "min_pixels" in caplog.text


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"do_normalize": False}, UnsupportedModelError, "do_normalize=false"),
        ({"resample": 1}, UnsupportedModelError, "resample=1"),
        ({"fps": "2"}, CheckpointError, "fps of type float, found '2'"),
        ({"min_frames": 0}, CheckpointError, "positive min_frames"),
        ({"max_frames": 2.5}, CheckpointError, "max_frames of type int"),
        ({"num_frames": -1}, CheckpointError, "positive num_frames"),
        ({"cap_pixels_per_frame": 1}, CheckpointError, "cap_pixels_per_frame of type bool"),
        ({"max_video_tokens": 0}, CheckpointError, "positive max_video_tokens"),
    ],
)
def test_unusable_configs_are_refused_by_name(config, error, message):
    with pytest.raises(error, match=message):
        VideoProcessorConfig.from_dict(config)
