"""The image part of a checkpoint's preprocessor file, parsed once into a frozen dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from PIL import Image

from qwen3vl_export.errors import CheckpointError, UnsupportedModelError
from qwen3vl_runtime.limits import MAX_INTEGER, is_integer, is_real, shown

__all__ = ["ImageProcessorConfig", "read_positive", "read_value"]

T = TypeVar("T", int, float, bool)
Triple = tuple[float, float, float]

#: Keeps every normalised value, and the tables it is read from, finite in float32.
_SCALE_RANGE = (1e-6, 1e6)
_REQUIRED_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


@dataclass(frozen=True)
class ImageProcessorConfig:
    """Image part of a checkpoint's preprocessing; defaults are those of `Qwen2VLImageProcessor`.

    Attributes:
        patch_size: Side of a patch in pixels.
        temporal_patch_size: Frames in a patch; an image is repeated that often.
        merge_size: Side, in patches, of the square that merges into one visual token.
        image_mean: Subtracted from red, green and blue after rescaling.
        image_std: What red, green and blue are then divided by.
        rescale_factor: What a byte is multiplied by.
        resample: `PIL.Image.Resampling` filter, as its integer.
        min_pixels: Smallest area after resizing, in pixels.
        max_pixels: Largest area after resizing, in pixels.
    """

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    image_mean: Triple = (0.48145466, 0.4578275, 0.40821073)
    image_std: Triple = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255
    resample: int = int(Image.Resampling.BICUBIC)
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    @property
    def size_factor(self) -> int:
        """What height and width become multiples of: the side of one visual token in pixels."""
        return self.patch_size * self.merge_size

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Parse the content of a `preprocessor_config.json`.

        As in transformers, an absent or null value takes its default, the top-level `min_pixels`
        and `max_pixels` of older files win over `size`, and unknown keys are information only.

        Raises:
            UnsupportedModelError: A preprocessing step is switched off, or the filter is unknown.
            CheckpointError: A value has the wrong type or cannot be used.
        """
        for step in _REQUIRED_STEPS:
            if read_value(config, step, bool, True) is not True:
                raise UnsupportedModelError(
                    f"the processor config has {step}=false, but preprocessing without that step "
                    "is not supported; set it to true or remove it"
                )
        default = cls()
        min_pixels, max_pixels = _read_size(config, default)
        parsed = replace(
            default,
            patch_size=read_positive(config, "patch_size", default.patch_size),
            temporal_patch_size=read_positive(
                config, "temporal_patch_size", default.temporal_patch_size
            ),
            merge_size=read_positive(config, "merge_size", default.merge_size),
            image_mean=_triple(config, "image_mean", default.image_mean),
            image_std=_triple(config, "image_std", default.image_std),
            rescale_factor=read_value(config, "rescale_factor", float, default.rescale_factor),
            resample=read_value(config, "resample", int, default.resample),
            min_pixels=min_pixels,
            max_pixels=max_pixels,
        )
        if parsed.resample not in list(Image.Resampling):
            raise UnsupportedModelError(
                f"the processor config has resample={parsed.resample}, which is none of Pillow's "
                f"filters {[int(f) for f in Image.Resampling]}"
            )
        scales = (parsed.rescale_factor, *parsed.image_std)
        low, high = _SCALE_RANGE
        if not all(is_real(scale, low, high) for scale in scales):
            raise CheckpointError(
                "the processor config must have a positive rescale_factor and image_std, from "
                f"{low:g} to {high:g}, found {parsed.rescale_factor} and {list(parsed.image_std)}"
            )
        return parsed


def read_value(config: Mapping[str, Any], key: str, kind: type[T], default: T) -> T:
    """Return `config[key]`, or `default` where it is absent or null.

    Raises:
        CheckpointError: It is not of type `kind` (an int passes for a float), or is NaN or absurdly
            large.
    """
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise CheckpointError(
            f"the processor config must have {key} of type {kind.__name__}, found {shown(value)}"
        )
    if kind is not bool and not is_real(value, -MAX_INTEGER, MAX_INTEGER):
        raise CheckpointError(
            f"the processor config must have {key} as a number below 2^63, found {shown(value)}"
        )
    return kind(value)


def read_positive(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return `config[key]`, or `default` where it is absent or null.

    Raises:
        CheckpointError: It is not an integer above zero.
    """
    value = read_value(config, key, int, default)
    if not is_integer(value):
        raise CheckpointError(f"the processor config must have a positive {key}, found {value}")
    return value


def _triple(config: Mapping[str, Any], key: str, default: Triple) -> Triple:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, (list, tuple)):
        value = [value] * 3
    limit = _SCALE_RANGE[1]
    if len(value) != 3 or not all(is_real(v, -limit, limit) for v in value):
        raise CheckpointError(
            f"the processor config must have {key} as three numbers up to {limit:g}, found "
            f"{shown(config[key])}"
        )
    return float(value[0]), float(value[1]), float(value[2])


def _read_size(config: Mapping[str, Any], default: ImageProcessorConfig) -> tuple[int, int]:
    size = config.get("size")
    if size is None:
        size = {"shortest_edge": default.min_pixels, "longest_edge": default.max_pixels}
    if not isinstance(size, Mapping):
        raise CheckpointError(f"the processor config must have size as an object, found {size!r}")
    size = {key: value for key, value in size.items() if value is not None}
    for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if config.get(key) is not None:
            size.pop(key, None)
            size[edge] = config[key]
    if set(size) != {"shortest_edge", "longest_edge"}:
        raise CheckpointError(
            "the processor config must have size with exactly shortest_edge and longest_edge "
            f"(areas in pixels), found {sorted(size)}"
        )
    return read_positive(size, "shortest_edge", 0), read_positive(size, "longest_edge", 0)
