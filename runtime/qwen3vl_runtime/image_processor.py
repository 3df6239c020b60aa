"""An RGB image becomes normalised patches, bit for bit as in transformers' Pillow processor.

The order of the work follows `Qwen2VLImageProcessorPil`: choose a size (`smart_resize`), resize
8-bit pixels with Pillow, rescale and normalise, cut into patches. Rescaling and normalising are
functions of one byte, so they become a table of 256 floats a channel; the floats are the same and
no float64 copy of the image is needed. Videos use the same patches (`video_processor.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from qwen3vl_export.errors import InputError
from qwen3vl_runtime.image_config import ImageProcessorConfig
from qwen3vl_runtime.limits import shown
from qwen3vl_runtime.media import MAX_IMAGE_PIXELS

__all__ = [
    "MAX_ASPECT_RATIO",
    "ImageProcessorConfig",
    "VisualInput",
    "check_aspect_ratio",
    "fit_limits",
    "patchify",
    "pixel_limits",
    "preprocess_image",
    "smart_resize",
]

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class VisualInput:
    """One image or video, ready for the vision encoder.

    Attributes:
        pixel_values: float32 [frames, patches, channels * temporal_patch_size * patch_size^2]; one
            frame a temporal patch; the merge_size^2 patches of one visual token are consecutive.
        grid_thw: Temporal patches, and rows and columns of patches before merging.
        timestamps: Seconds at the middle of each temporal patch of a video; None for an image.
    """

    pixel_values: np.ndarray
    grid_thw: tuple[int, int, int]
    timestamps: tuple[float, ...] | None = None


def preprocess_image(
    image: Image.Image,
    config: ImageProcessorConfig,
    *,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
) -> VisualInput:
    """Resize, normalise and cut one image into patches.

    Args:
        image: An RGB image, as `load_image` returns it.
        config: The checkpoint's preprocessing.
        min_pixels: Replaces the smallest area of `config`.
        max_pixels: Replaces the largest area of `config`.

    Returns:
        Patches of one frame, equal bit for bit to those of `Qwen2VLImageProcessorPil`.

    Raises:
        InputError: The image is not RGB, too elongated, or would be resized to more than
            `MAX_IMAGE_PIXELS`; or the limits contradict each other.
    """
    if image.mode != "RGB":
        raise InputError(f"expected an RGB image, found mode {image.mode!r}; load it by load_image")
    low, high = pixel_limits(config, min_pixels, max_pixels)
    height, width = smart_resize(image.height, image.width, config.size_factor, low, high)
    if height * width > MAX_IMAGE_PIXELS:
        raise InputError(
            f"an image may be resized to at most {MAX_IMAGE_PIXELS} pixels, but these limits ask "
            f"for {shown(height * width)}; lower min_pixels or max_pixels"
        )
    resized = image.resize((width, height), Image.Resampling(config.resample))
    frames = np.asarray(resized)[None]  # [1, height, width, 3]
    grid_thw = (1, height // config.patch_size, width // config.patch_size)
    return VisualInput(patchify(frames, _byte_table(config), config), grid_thw)


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Choose the size an image is resized to (`smart_resize` of transformers' Qwen2-VL).

    Both sides become the nearest multiples of `factor`; if the area then leaves
    [min_pixels, max_pixels], both sides are scaled alike and rounded inwards.

    Args:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        factor: What both sides must be a multiple of, in pixels.
        min_pixels: Smallest area.
        max_pixels: Largest area; a side never shrinks below `factor`, even if that exceeds it.

    Returns:
        New height and width.

    Raises:
        InputError: One side is more than 200 times the other.
    """
    check_aspect_ratio(height, width)
    return fit_limits(1, 1, height, width, factor, min_pixels, max_pixels)


def fit_limits(
    num_frames: int,
    rounded_frames: int,
    height: int,
    width: int,
    factor: int,
    min_pixels: int,
    max_pixels: int,
) -> tuple[int, int]:
    """Round a size to multiples of `factor` within limits of frames * height * width.

    Args:
        num_frames: Frames the scale is computed from; 1 for an image.
        rounded_frames: Frames the limits are checked with; 1 for an image.
        height: Height in pixels.
        width: Width in pixels.
        factor: What both sides must be a multiple of.
        min_pixels: Smallest volume.
        max_pixels: Largest volume; a side never shrinks below `factor`, even if that exceeds it.

    Returns:
        New height and width.
    """
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if rounded_frames * new_height * new_width > max_pixels:
        beta = math.sqrt((num_frames * height * width) / max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif rounded_frames * new_height * new_width < min_pixels:
        beta = math.sqrt(min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def check_aspect_ratio(height: int, width: int) -> None:
    """Refuse a size that Qwen3-VL was not made for.

    Raises:
        InputError: A side is zero, or one side is more than 200 times the other.
    """
    if min(height, width) <= 0 or max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise InputError(
            f"one side of an image or video may be at most {MAX_ASPECT_RATIO} times the other, "
            f"found {width}x{height} (width x height); crop or pad it"
        )


def pixel_limits(
    config: ImageProcessorConfig, min_pixels: int | None, max_pixels: int | None
) -> tuple[int, int]:
    """Return the smallest and largest area, a call's own limits before those of `config`.

    Raises:
        InputError: A limit is not a positive integer, or the smallest exceeds the largest.
    """
    for name, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)):
        if value is not None and (type(value) is not int or value <= 0):
            raise InputError(f"{name} must be a positive integer, found {value!r}")
    low = config.min_pixels if min_pixels is None else min_pixels
    high = config.max_pixels if max_pixels is None else max_pixels
    if low > high:
        raise InputError(f"min_pixels {low} exceeds max_pixels {high}; give both limits")
    return low, high


def patchify(frames: np.ndarray, table: np.ndarray, config: ImageProcessorConfig) -> np.ndarray:
    """Cut frames into normalised, flattened patches.

    Args:
        frames: uint8 [num_frames, height, width, 3]; both sides multiples of `config.size_factor`.
        table: float32 [3, 256], the normalised value of each byte of each channel.
        config: Patch sizes.

    Returns:
        float32 [temporal patches, patches, 3 * temporal_patch_size * patch_size^2]. If the last
        temporal patch is not full, its last frame is repeated.
    """
    num_frames, height, width, _ = frames.shape
    patch, merge, depth = config.patch_size, config.merge_size, config.temporal_patch_size
    rows, columns = height // config.size_factor, width // config.size_factor
    grid_t = -(-num_frames // depth)
    out = np.empty((grid_t, rows, columns, merge, merge, 3, depth, patch, patch), np.float32)
    # One temporal patch at a time keeps the temporaries small however long the video is.
    for t in range(grid_t):
        chunk = frames[t * depth : (t + 1) * depth]
        count = len(chunk)
        pixels = chunk.reshape(count, rows, merge, patch, columns, merge, patch, 3)
        # [3, count, rows, columns, merge, merge, patch, patch]
        pixels = np.ascontiguousarray(pixels.transpose(7, 0, 1, 4, 2, 5, 3, 6))
        values = np.empty(pixels.shape, np.float32)
        for channel in range(3):
            # A byte is always inside the table; mode="clip" spares numpy a buffer for the check.
            np.take(table[channel], pixels[channel], out=values[channel], mode="clip")
        # [rows, columns, merge, merge, 3, count, patch, patch]
        values = values.transpose(2, 3, 4, 5, 0, 1, 6, 7)
        out[t, ..., :count, :, :] = values
        out[t, ..., count:, :, :] = values[..., -1:, :, :]
    return out.reshape(grid_t, rows * columns * merge**2, 3 * depth * patch**2)


def _byte_table(config: ImageProcessorConfig) -> np.ndarray:
    """float32 [3, 256]: rescaled in float64, rounded, then normalised in float32, as in numpy."""
    scaled = (np.arange(256, dtype=np.float64) * config.rescale_factor).astype(np.float32)
    mean = np.array(config.image_mean, np.float32)[:, None]
    std = np.array(config.image_std, np.float32)[:, None]
    table: np.ndarray = (scaled - mean) / std
    return table
