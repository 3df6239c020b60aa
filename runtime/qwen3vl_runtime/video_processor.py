"""A video becomes sampled, normalised patches and their times, as in `Qwen3VLVideoProcessor`.

Frame choice, sizes, timestamps, normalisation and patch layout equal transformers'. Two things are
deliberately different:

- Frames are resized by Pillow; transformers resizes videos by torchvision. Both filter 8-bit values
  with the same weights and round differently: measured on noise, the worst case, 0.6 % of values
  differ (bilinear: 1.1 %), by one level of 255, rarely by two.
- A video of fewer frames than one temporal patch is padded by repeating its last frame before its
  size is chosen; transformers refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from qwen3vl_export.errors import InputError
from qwen3vl_runtime.image_processor import (
    VisualInput,
    check_aspect_ratio,
    fit_limits,
    patchify,
    pixel_limits,
)
from qwen3vl_runtime.limits import is_integer, positive_fps, shown
from qwen3vl_runtime.media import MAX_VIDEO_PIXELS, VideoFrames
from qwen3vl_runtime.video_config import VideoProcessorConfig

__all__ = [
    "VideoProcessorConfig",
    "frame_timestamps",
    "preprocess_video",
    "sample_frame_indices",
    "smart_resize_video",
]

#: Most frames sampled by count from a video that has fewer: ten times what Qwen3-VL was made for.
_MAX_REPEATED_FRAMES = 7680


def preprocess_video(
    video: VideoFrames,
    config: VideoProcessorConfig,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    do_sample_frames: bool | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> VisualInput:
    """Sample, resize, normalise and cut one video into patches.

    Args:
        video: All its frames.
        config: The checkpoint's preprocessing.
        fps: Frames to sample a second, instead of what `config` says.
        num_frames: Frames to sample in all, instead of what `config` says.
        do_sample_frames: Whether to sample; False uses every frame.
        min_pixels: Smallest frames * height * width, instead of that of `config`.
        max_pixels: Largest frames * height * width, instead of that of `config`.

    Returns:
        Patches, grid and one timestamp a temporal patch.

    Raises:
        InputError: The parameters contradict each other, or the frames are too elongated or would
            be resized to more than `MAX_VIDEO_PIXELS` together.
    """
    total = len(video.frames)
    if config.do_sample_frames if do_sample_frames is None else do_sample_frames:
        indices = sample_frame_indices(total, video.fps, config, fps=fps, num_frames=num_frames)
    elif fps is not None or num_frames is not None:
        raise InputError("fps and num_frames sample frames, but do_sample_frames is false")
    else:
        indices = np.arange(total)
    low, high = pixel_limits(config, min_pixels, max_pixels)
    # The padded count is what the encoder will see; it differs from len(indices) only where
    # transformers would refuse the video.
    count = max(len(indices), config.temporal_patch_size)
    if config.cap_pixels_per_frame:
        high = _capped_max_pixels(count, low, high, config)
    width, height = video.frames[0].size
    height, width = smart_resize_video(
        count, height, width, config.temporal_patch_size, config.size_factor, low, high
    )
    if count * height * width > MAX_VIDEO_PIXELS:
        raise InputError(
            f"the frames of a video may be resized to at most {MAX_VIDEO_PIXELS} pixels together, "
            f"but these limits ask for {count} frames of {width}x{height} (width x height); lower "
            "min_pixels, max_pixels or the number of frames"
        )
    frames = np.stack([_resize(video.frames[i], height, width, config) for i in indices])
    pixel_values = patchify(frames, _byte_table(config), config)
    grid_thw = (len(pixel_values), height // config.patch_size, width // config.patch_size)
    timestamps = frame_timestamps(indices, video.fps, config.temporal_patch_size)
    return VisualInput(pixel_values, grid_thw, timestamps)


def sample_frame_indices(
    total: int,
    raw_fps: float,
    config: VideoProcessorConfig,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
) -> np.ndarray:
    """Choose frames spread evenly from the first to the last (`sample_frames` of transformers).

    By rate, `total / raw_fps * fps` frames are taken, at least `min_frames`, at most `max_frames`
    and at most all. By count, exactly `num_frames` are taken; a shorter video repeats frames.

    Args:
        total: Frames the video has.
        raw_fps: Frames a second it was recorded at.
        config: Gives what `fps` and `num_frames` leave open, and the limits.
        fps: Frames to sample a second.
        num_frames: Frames to sample in all.

    Returns:
        Ascending int64 [sampled frames].

    Raises:
        InputError: A value cannot be used, or both `fps` and `num_frames` are set.
    """
    if type(total) is not int or total <= 0:
        raise InputError(f"a video needs at least one frame, found {total!r}")
    raw_fps = positive_fps(raw_fps, "raw_fps")
    if fps is None and num_frames is None:
        fps, num_frames = config.fps, config.num_frames
    if fps is not None and num_frames is not None:
        raise InputError(f"give fps or num_frames, not both; found {fps!r} and {num_frames!r}")
    most = max(total, _MAX_REPEATED_FRAMES)
    if num_frames is not None and not is_integer(num_frames, 1, most):
        raise InputError(
            f"num_frames must be a positive integer, found {shown(num_frames)}; give at most {most}"
        )
    if num_frames is None:
        wanted = int(total / raw_fps * positive_fps(fps, "fps"))
        num_frames = min(max(wanted, config.min_frames), config.max_frames, total)
    return np.linspace(0, total - 1, num_frames).round().astype(np.int64)


def smart_resize_video(
    num_frames: int,
    height: int,
    width: int,
    temporal_factor: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    """Choose the size frames are resized to (`smart_resize` of transformers' Qwen3-VL video).

    Like `smart_resize` of images, over frames * height * width; frames smaller than `factor` count
    as if enlarged to it.

    Args:
        num_frames: Frames the video will have.
        height: Height of a frame in pixels.
        width: Width of a frame in pixels.
        temporal_factor: Frames in a temporal patch.
        factor: What both sides must be a multiple of, in pixels.
        min_pixels: Smallest volume.
        max_pixels: Largest volume; a side never shrinks below `factor`, even if that exceeds it.

    Returns:
        New height and width.

    Raises:
        InputError: Too few frames, or one side is more than 200 times the other.
    """
    if num_frames < temporal_factor:
        raise InputError(
            f"a video needs at least {temporal_factor} frames, found {num_frames}; repeat its last"
        )
    check_aspect_ratio(height, width)
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
        check_aspect_ratio(height, width)
    frames = round(num_frames / temporal_factor) * temporal_factor
    return fit_limits(num_frames, frames, height, width, factor, min_pixels, max_pixels)


def frame_timestamps(
    indices: Sequence[int] | np.ndarray, raw_fps: float, temporal_patch_size: int
) -> tuple[float, ...]:
    """Return the middle of each temporal patch: the mean time of its first and its last frame.

    As `Qwen3VLProcessor._calculate_timestamps`; a last patch that is not full repeats its frame.

    Args:
        indices: Positions of the sampled frames in the video.
        raw_fps: Frames a second the video was recorded at.
        temporal_patch_size: Frames in a temporal patch.

    Returns:
        Seconds, one value a temporal patch.
    """
    raw_fps = positive_fps(raw_fps, "raw_fps")
    times = [int(index) / raw_fps for index in indices]
    last = len(times) - 1
    return tuple(
        (times[first] + times[min(first + temporal_patch_size - 1, last)]) / 2
        for first in range(0, len(times), temporal_patch_size)
    )


def _capped_max_pixels(
    num_frames: int, min_pixels: int, max_pixels: int, config: VideoProcessorConfig
) -> int:
    """Largest volume when no frame may cost more than `max_video_tokens` (`resize` upstream)."""
    frame_cap = min(config.max_video_tokens * config.size_factor**2, max_pixels // num_frames)
    return max(frame_cap, int(min_pixels * 1.05)) * num_frames


def _resize(
    frame: Image.Image, height: int, width: int, config: VideoProcessorConfig
) -> np.ndarray:
    """uint8 [height, width, 3].

    Pillow may filter columns first where that is cheaper. torchvision filters rows first, and as
    values are clipped to 8 bits in between, the order shows: it is forced by two calls.
    """
    resample = Image.Resampling(config.resample)
    rows_filtered = frame.resize((width, frame.height), resample)
    return np.asarray(rows_filtered.resize((width, height), resample))


def _byte_table(config: VideoProcessorConfig) -> np.ndarray:
    """float32 [3, 256]: mean and std scaled up to bytes first, as transformers does for videos."""
    scale = np.float32(1.0 / config.rescale_factor)
    mean = (np.array(config.image_mean, np.float32) * scale)[:, None]
    std = (np.array(config.image_std, np.float32) * scale)[:, None]
    table: np.ndarray = (np.arange(256, dtype=np.float32) - mean) / std
    return table
