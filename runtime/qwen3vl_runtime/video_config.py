"""The video part of a checkpoint's preprocessor file, parsed once into a frozen dataclass."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from PIL import Image

from qwen3vl_export.errors import CheckpointError, UnsupportedModelError
from qwen3vl_runtime.image_config import ImageProcessorConfig, read_positive, read_value
from qwen3vl_runtime.limits import FPS_RANGE, is_real

__all__ = ["VideoProcessorConfig"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VideoProcessorConfig(ImageProcessorConfig):
    """Video part of a checkpoint's preprocessing; defaults are those of `Qwen3VLVideoProcessor`.

    `min_pixels` and `max_pixels` bound frames * height * width of the whole video.

    Attributes:
        fps: Frames to sample a second; None if `num_frames` rules.
        num_frames: Frames to sample from any video; None if `fps` rules.
        min_frames: Fewest frames sampled by `fps`, unless the video is shorter.
        max_frames: Most frames sampled by `fps`.
        do_sample_frames: Whether to sample at all.
        cap_pixels_per_frame: Whether one frame may cost `max_video_tokens` at most.
        max_video_tokens: Visual tokens a frame under `cap_pixels_per_frame`.
    """

    patch_size: int = 16
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    min_pixels: int = 128 * 32 * 32
    max_pixels: int = 768 * 32 * 32
    fps: float | None = 2.0
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    do_sample_frames: bool = True
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Parse the content of a `video_preprocessor_config.json`.

        As in transformers, an absent or null value takes its default and unknown keys are
        information only, as are top-level `min_pixels` and `max_pixels` (logged as a warning).
        A file with `num_frames` and no `fps` samples by `num_frames`.

        Raises:
            UnsupportedModelError: A preprocessing step is switched off, or the filter is neither
                bilinear nor bicubic.
            CheckpointError: A value has the wrong type or cannot be used.
        """
        ignored = [key for key in ("min_pixels", "max_pixels") if config.get(key) is not None]
        if ignored:
            logger.warning("the video processor config sets %s; only size is used", ignored)
        parsed = super().from_dict({key: config[key] for key in config if key not in ignored})
        # Pillow's other filters place or weigh pixels unlike torchvision's of the same name.
        if parsed.resample not in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC):
            raise UnsupportedModelError(
                f"the video processor config has resample={parsed.resample}, but videos are "
                "resized by 2 (bilinear) or 3 (bicubic) only"
            )
        by_count = config.get("num_frames") is not None
        has_fps = config.get("fps") is not None or not by_count
        fps = read_value(config, "fps", float, 2.0) if has_fps else None
        if has_fps and not is_real(fps, *FPS_RANGE):
            low, high = FPS_RANGE
            raise CheckpointError(
                f"the video processor config must have fps from {low:g} to {high:g}, found {fps}"
            )
        return replace(
            parsed,
            fps=fps,
            num_frames=read_positive(config, "num_frames", 1) if by_count else None,
            min_frames=read_positive(config, "min_frames", parsed.min_frames),
            max_frames=read_positive(config, "max_frames", parsed.max_frames),
            do_sample_frames=read_value(config, "do_sample_frames", bool, True),
            cap_pixels_per_frame=read_value(config, "cap_pixels_per_frame", bool, False),
            max_video_tokens=read_positive(config, "max_video_tokens", parsed.max_video_tokens),
        )
