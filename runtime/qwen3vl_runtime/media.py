"""Whatever a user calls an image or a video becomes upright 8-bit RGB Pillow images here.

Later stages see `PIL.Image.Image` in mode RGB and `VideoFrames` only, so every doubt about a source
(orientation, transparency, bit depth, truncation, hostile sizes) is settled in this module. It
knows nothing about patches or models, and it does not decode video containers.

Orientation follows `load_image` and colour conversion follows `convert_to_rgb` of transformers:
EXIF rotation is applied and transparency is composited onto white. More than 8 bits a channel is
refused, because Pillow's conversion would silently clip every value above 255 to white.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from qwen3vl_export.errors import InputError
from qwen3vl_runtime.limits import positive_fps
from qwen3vl_runtime.media_source import (
    list_folder,
    local_folder,
    read_source,
    refuse_video_container,
)

__all__ = [
    "MAX_IMAGE_PIXELS",
    "MAX_VIDEO_PIXELS",
    "ImageSource",
    "VideoFrames",
    "VideoSource",
    "load_frames",
    "load_image",
]

ImageSource: TypeAlias = "Image.Image | np.ndarray | str | os.PathLike[str] | bytes"
VideoSource: TypeAlias = "Sequence[ImageSource] | np.ndarray | str | os.PathLike[str] | bytes"

MAX_IMAGE_PIXELS = 89_478_485
"""Most pixels an encoded image may decode to; where Pillow starts to warn of a bomb."""

MAX_VIDEO_PIXELS = 2**30
"""Most pixels all frames of one animated file may decode to together (3 GiB of RGB)."""

#: End marker of a JPEG 2000 codestream (ISO/IEC 15444-1, annex A), which cannot occur inside it.
#: Pillow decodes a truncated one without an error, into another picture.
_JPEG2000_END = b"\xff\xd9"
#: Pillow hands these to outside programs (EPS to Ghostscript) or to the operating system.
_REFUSED_FORMATS = ("EPS", "PDF", "WMF")


@dataclass(frozen=True)
class VideoFrames:
    """All frames of a video, before any is sampled.

    Attributes:
        frames: RGB images of one common size, in playing order; at least one.
        fps: Frames a second at which `frames` were recorded.

    Raises:
        InputError: No frames, frames that are not RGB or differ in size, or an unusable `fps`.
    """

    frames: tuple[Image.Image, ...]
    fps: float

    def __post_init__(self) -> None:
        """Check the promises that the class docstring makes."""
        positive_fps(self.fps, "the fps of a video")
        if not self.frames:
            raise InputError("a video needs at least one frame, found none")
        size = self.frames[0].size
        for index, frame in enumerate(self.frames):
            if frame.mode != "RGB":
                raise InputError(
                    f"video frames must be RGB images, found mode {frame.mode!r} at frame {index}; "
                    "load them with load_frames"
                )
            if frame.size != size:
                raise InputError(
                    f"all frames of a video must have the same size, found {_size(size)} at frame "
                    f"0 and {_size(frame.size)} at frame {index}; resize or crop them first"
                )


def load_image(source: ImageSource, *, allow_urls: bool = False) -> Image.Image:
    """Load one image as an upright RGB Pillow image that shares no memory with `source`.

    Args:
        source: A Pillow image; a uint8 array [height, width] or [height, width, 1 | 3 | 4]; a
            path; the bytes of an image file; a `file://` or `data:image/...;base64,` URL; or,
            where allowed, an `http(s)://` URL. Of an animated file the first frame is taken.
        allow_urls: Whether an `http(s)://` URL may be fetched.

    Raises:
        InputError: The source cannot be read, is no image, is damaged, decodes to more than
            `MAX_IMAGE_PIXELS`, or has more than 8 bits a channel. The message names the source.
    """
    if isinstance(source, Image.Image):
        return _upright_rgb(source, "the Pillow image")
    if isinstance(source, np.ndarray):
        return _array_to_rgb(source)
    data, name = read_source(source, allow_urls)
    with _opened(data, name) as image:
        return _upright_rgb(image, name)


def load_frames(
    source: VideoSource, *, raw_fps: float | None = None, allow_urls: bool = False
) -> VideoFrames:
    """Load all frames of a video.

    Args:
        source: A list or tuple of anything `load_image` takes; a uint8 array
            [frames, height, width, 3]; a folder of images, taken in natural order of their names
            (frame2 before frame10; hidden files are skipped, anything else that is no image is an
            error); or an animated GIF, WebP, APNG or AVIF as path, bytes or URL.
        raw_fps: Frames a second of `source`. Required unless the source is an animated file, whose
            own frame durations it then replaces.
        allow_urls: Whether `http(s)://` URLs may be fetched.

    Raises:
        InputError: As for `load_image`, or the source is a video container, has no frames, frames
            of different sizes, no known or no constant frame rate.
    """
    if isinstance(source, (list, tuple)):
        fps = _required_fps(raw_fps, "a list of frames")
        return VideoFrames(tuple(_listed_frames(source, allow_urls)), fps)
    if isinstance(source, np.ndarray):
        fps = _required_fps(raw_fps, "an array of frames")
        if source.dtype != np.uint8 or source.ndim != 4 or source.shape[3] != 3:
            raise InputError(
                "a video array must be uint8 of shape [frames, height, width, 3], found "
                f"{source.dtype} of shape {list(source.shape)}"
            )
        return VideoFrames(tuple(_array_to_rgb(frame) for frame in source), fps)
    if isinstance(source, (str, os.PathLike)):
        folder = local_folder(os.fspath(source))
        refuse_video_container(os.fspath(source))
        if folder is not None:
            fps = _required_fps(raw_fps, "a folder of frames")
            return VideoFrames(tuple(load_image(path) for path in list_folder(folder)), fps)
    data, name = read_source(source, allow_urls)
    with _opened(data, name) as image:
        return _animation(image, name, raw_fps)


def _required_fps(raw_fps: float | None, what: str) -> float:
    if raw_fps is None:
        raise InputError(f"{what} has no frame rate of its own; pass raw_fps, its frames a second")
    return positive_fps(raw_fps, "raw_fps")


def _listed_frames(sources: Sequence[ImageSource], allow_urls: bool) -> Iterator[Image.Image]:
    for index, source in enumerate(sources):
        try:
            yield load_image(source, allow_urls=allow_urls)
        except InputError as e:
            raise InputError(f"frame {index} of the list: {e}") from e


def _animation(image: Image.Image, name: str, raw_fps: float | None) -> VideoFrames:
    with _decoding(name):
        count = getattr(image, "n_frames", 1)
    if count < 2:
        raise InputError(
            f"a video file must be an animated image, but {name} is a still {image.format} image; "
            "for a video of one frame pass it in a list, with raw_fps"
        )
    if count * image.width * image.height > MAX_VIDEO_PIXELS:
        raise InputError(
            f"{name} has {count} frames of {_size(image.size)}, more than the {MAX_VIDEO_PIXELS} "
            "pixels a video file may decode to; shorten or shrink it"
        )
    # An APNG may start with a still for programs that cannot animate; it is not part of the film.
    first = 1 if getattr(image, "default_image", False) else 0
    frames, durations_ms = [], []
    for index in range(first, count):
        with _decoding(name):
            image.seek(index)
            image.load()
        frames.append(_upright_rgb(image, name))
        durations_ms.append(image.info.get("duration"))
    fps = _animation_fps(durations_ms, name) if raw_fps is None else raw_fps
    return VideoFrames(tuple(frames), positive_fps(fps, "raw_fps"))


def _animation_fps(durations_ms: list[float | None], name: str) -> float:
    first = durations_ms[0]
    if not first or not all(durations_ms):
        raise InputError(f"{name} has frames without a duration; pass raw_fps, its frames a second")
    if any(duration != first for duration in durations_ms):
        shown = sorted({float(duration or 0) for duration in durations_ms})[:5]
        raise InputError(
            f"all frames of an animation must last equally long, but {name} has durations of "
            f"{shown} ms; re-encode it, or pass raw_fps to play all frames equally long"
        )
    return 1000 / first


def _upright_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.width == 0 or image.height == 0:
        raise InputError(f"an image must have pixels, but {name} is {_size(image.size)}")
    if image.mode.startswith(("I", "F")):
        raise InputError(
            f"an image must have 8 bits a channel, but {name} has mode {image.mode!r}; scale its "
            "values to 0..255 and save it as 8 bits"
        )
    with _decoding(name):
        image = ImageOps.exif_transpose(image)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, (255, 255, 255, 255))
            return Image.alpha_composite(white, image).convert("RGB")
        # exif_transpose has copied already, so an RGB image needs no second copy.
        return image if image.mode == "RGB" else image.convert("RGB")


def _array_to_rgb(array: np.ndarray) -> Image.Image:
    shape = list(array.shape)
    if array.dtype != np.uint8:
        raise InputError(
            f"an image array must be uint8 with values 0..255, found {array.dtype} of shape "
            f"{shape}; scale and convert it first"
        )
    if array.ndim == 2:
        array = array[:, :, None]  # [height, width, 1]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise InputError(
            "an image array must have shape [height, width] or [height, width, channels] with 1, "
            f"3 or 4 channels last, found {shape}"
        )
    if array.shape[2] == 1:
        array = np.repeat(array, 3, axis=2)
    elif array.shape[2] == 4:
        # Rounded float blending as transformers does it for arrays; Pillow's integer blending, used
        # for Pillow images, differs from it by up to one level.
        alpha = array[:, :, 3:] / 255
        array = np.round(alpha * array[:, :, :3] + (1 - alpha) * 255).astype(np.uint8)
    return Image.fromarray(np.ascontiguousarray(array))


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[Image.Image]:
    """Open an encoded image without decoding its pixels, and refuse it by its header alone."""
    with _decoding(name):
        image = Image.open(io.BytesIO(data))
    with image:
        if image.format in _REFUSED_FORMATS:
            raise InputError(
                f"{name} is a {image.format} file, which needs an outside program to draw; "
                "convert it to PNG or JPEG"
            )
        if image.width * image.height > MAX_IMAGE_PIXELS:
            raise InputError(_too_many_pixels(name, _size(image.size)))
        if image.format == "JPEG2000" and _JPEG2000_END not in data:
            raise InputError(f"{name} is damaged or incomplete: the end of its data is missing")
        yield image


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Turn whatever Pillow's decoders raise on bad input into an `InputError`."""
    try:
        with warnings.catch_warnings():
            # What is wrong with a file is raised, in one sentence; Pillow's warnings on the way to
            # it would only stand beside it on stderr.
            warnings.simplefilter("ignore")
            yield
    except UnidentifiedImageError as e:
        raise InputError(f"{name} is not an image in a format that Pillow can read") from e
    except Image.DecompressionBombError as e:
        raise InputError(_too_many_pixels(name, "too large")) from e
    except MemoryError:  # a full machine is no fault of the file
        raise
    # Damaged files make the decoders raise nearly anything: OSError, SyntaxError, struct.error ...
    except Exception as e:
        raise InputError(f"{name} is damaged or incomplete and cannot be decoded: {e}") from e


def _too_many_pixels(name: str, found: str) -> str:
    return f"an image may have at most {MAX_IMAGE_PIXELS} pixels, but {name} is {found}; shrink it"


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]} (width x height)"
