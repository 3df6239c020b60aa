"""Damaged, truncated and hostile image files: refused in one sentence, never half decoded."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from qwen3vl_export.errors import InputError
from qwen3vl_runtime.media import MAX_IMAGE_PIXELS, load_image


def encoded(image: Image.Image, format_: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds almost no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000")


@pytest.fixture(scope="module")
def files() -> dict[str, tuple[bytes, np.ndarray]]:
    """One image in every format: its file, and what it decodes to."""
    ramp = Image.fromarray(np.add.outer(np.arange(64), np.arange(48)).astype(np.uint8))
    image = Image.merge("RGB", [ramp, ImageOps.flip(ramp), ImageOps.mirror(ramp)])
    data = {format_: encoded(image, format_) for format_ in FORMATS}
    return {name: (content, np.asarray(load_image(content))) for name, content in data.items()}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(format_=st.sampled_from(FORMATS), cut=st.floats(0, 1))
@example(format_="JPEG2000", cut=0.46875)
@pytest.mark.filterwarnings("ignore:Truncated File Read")
def test_truncated_file_is_refused_or_complete(files, format_, cut):
    data, expected = files[format_]
    try:
        loaded = load_image(data[: int(cut * len(data))])
    except InputError:
        return
    np.testing.assert_array_equal(np.asarray(loaded), expected)


@pytest.mark.parametrize("format_", FORMATS)
def test_half_a_file_is_refused(files, format_, tmp_path):
    path = tmp_path / "half"
    path.write_bytes(files[format_][0][: len(files[format_][0]) // 2])
    with pytest.raises(InputError, match="half' is damaged or incomplete"):
        load_image(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(
    format_=st.sampled_from(FORMATS),
    position=st.floats(0, 1, exclude_max=True),
    garbage=st.binary(min_size=1, max_size=8),
)
@pytest.mark.filterwarnings("ignore")
def test_garbled_file_raises_nothing_but_input_errors(files, format_, position, garbage):
    data = files[format_][0]
    start = int(position * len(data))
    garbled = data[:start] + garbage + data[start + len(garbage) :]
    try:
        loaded = load_image(garbled)
    except InputError:
        return
    assert loaded.mode == "RGB"


@pytest.mark.parametrize("length", [8, 20, 60])
def test_damage_is_told_once(files, recwarn, length):
    """Pillow warns of a truncated TIFF before it raises, which would stand beside the error."""
    with pytest.raises(InputError, match="not an image"):
        load_image(files["TIFF"][0][:length])
    assert not recwarn.list


def test_damaged_pillow_image_is_refused(files):
    lazy = Image.open(io.BytesIO(files["PNG"][0][:-60]))
    with pytest.raises(InputError, match="the Pillow image is damaged"):
        load_image(lazy)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(10_000, 8_948), (30_000, 30_000), (65_500, 1_367)])
def test_bomb_is_refused_by_its_header(size):
    assert size[0] * size[1] > MAX_IMAGE_PIXELS
    with pytest.raises(InputError, match=f"at most {MAX_IMAGE_PIXELS} pixels"):
        load_image(png_header(*size))


@pytest.mark.filterwarnings("error")
def test_bomb_is_refused_where_warnings_are_errors():
    with pytest.raises(InputError, match=f"at most {MAX_IMAGE_PIXELS} pixels"):
        load_image(png_header(10_000, 9_000))


def test_size_below_the_limit_reaches_the_decoder():
    limit = Image.MAX_IMAGE_PIXELS
    with pytest.raises(InputError, match="damaged or incomplete"):
        load_image(png_header(3000, 2000))
    assert limit == Image.MAX_IMAGE_PIXELS
