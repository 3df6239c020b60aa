"""Loading of images and frames: all kinds of sources, colours as in transformers, refusals."""

from __future__ import annotations

import base64
import io
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image as reference_load_image

from qwen3vl_export.errors import InputError
from qwen3vl_runtime.media import load_frames, load_image


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: Image.Image, format_: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return Image.fromarray(random_pixels(20, 30, 3))


@pytest.fixture(scope="module")
def server(photo: Image.Image) -> Iterator[tuple[str, list[str]]]:
    """Base URL of a local web server, and the paths it was asked for."""
    asked: list[str] = []
    answers = {"/photo.png": encoded(photo), "/text": b"hello"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = answers.get(self.path)
            self.send_response(404 if body is None and self.path != "/drip" else 200)
            self.end_headers()
            self.wfile.write(body or b"")
            if self.path == "/drip":
                for _ in range(20):
                    self.wfile.write(b"drop")
                    time.sleep(0.05)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}", asked
        httpd.shutdown()
        thread.join()


class BytesPath(os.PathLike):  # type: ignore[type-arg]
    """A path object that is spelt in bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> bytes:
        return os.fsencode(self.path)


class TestSources:
    def test_every_kind_of_source_gives_the_same_image(self, photo, tmp_path, server):
        path = tmp_path / "a photo+ü.png"
        data = encoded(photo)
        path.write_bytes(data)
        text = base64.b64encode(data).decode()
        sources = [
            photo,
            np.asarray(photo),
            np.asarray(photo)[:, ::-1][:, ::-1],
            str(path),
            path,
            data,
            path.as_uri(),
            path.as_uri().replace("file://", "FILE://localhost"),
            f"data:image/png;base64,{text}",
            f"data:image/png;base64,{text.replace('+', '%2B')}",
            f"data:image/png;base64,{text[:50]}\n{text[50:]}\n",
        ]
        for source in sources:
            loaded = load_image(source)
            assert type(loaded) is Image.Image
            assert loaded.mode == "RGB"
            np.testing.assert_array_equal(np.asarray(loaded), np.asarray(photo))
        loaded = load_image(f"{server[0]}/photo.png", allow_urls=True)
        np.testing.assert_array_equal(np.asarray(loaded), np.asarray(photo))

    def test_result_shares_no_memory_with_the_source(self, photo):
        array = np.array(photo)
        image = photo.copy()
        loaded = [load_image(array), load_image(image)]
        array[:] = 0
        image.paste((0, 0, 0), (0, 0, 30, 20))
        for result in loaded:
            np.testing.assert_array_equal(np.asarray(result), np.asarray(photo))

    def test_urls_are_fetched_only_where_allowed(self, server):
        url, asked = server
        before = list(asked)
        with pytest.raises(InputError, match="allow_urls=True"):
            load_image(f"{url}/photo.png")
        with pytest.raises(InputError, match="allow_urls=True"):
            load_frames([f"{url}/photo.png"], raw_fps=2)
        assert asked == before
        with pytest.raises(InputError, match=r"missing\.png' cannot be fetched: .*404"):
            load_image(f"{url}/missing.png", allow_urls=True)
        with pytest.raises(InputError, match="text' is not an image"):
            load_image(f"{url}/text", allow_urls=True)
        with pytest.raises(InputError, match="cannot be fetched"):
            load_image("http://127.0.0.1:1/closed.png", allow_urls=True)

    def test_download_has_a_size_limit(self, server, monkeypatch):
        monkeypatch.setattr("qwen3vl_runtime.media_source._MAX_DOWNLOAD_BYTES", 10)
        with pytest.raises(InputError, match="larger than 10 bytes"):
            load_image(f"{server[0]}/photo.png", allow_urls=True)

    def test_slow_sender_is_given_up(self, server, monkeypatch):
        monkeypatch.setattr("qwen3vl_runtime.media_source._DOWNLOAD_TIMEOUT_S", 0.3)
        with pytest.raises(InputError, match=r"drip' took longer than 0\.3 s"):
            load_image(f"{server[0]}/drip", allow_urls=True)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("no/such.png", "'no/such.png' does not exist"),
            (Path("no/such.png"), "'no/such.png' does not exist"),
            ("file:///no/such.png", "'file:///no/such.png' does not exist"),
            ("file://server/share.png", "does not exist"),
            ("/tmp", "'/tmp' is a directory"),
            ("/dev/null", "not a regular file"),
            ("A" * 5000, r"'A{80}\.\.\.A{80}' cannot be read"),
            ("nul\0.png", "does not exist"),
            (b"", "given as 0 bytes is empty"),
            (b"just some text, no picture", "given as 26 bytes is not an image"),
            (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "EPS file"),
            ("data:image/png;base64,@@@@", "does not hold valid base64"),
            ("data:image/png;base64,QUJ", "does not hold valid base64"),
            ("data:image/png;base64,", "is empty"),
            ("data:image/png,QUJD", "must start with 'data:image/<format>;base64,'"),
            ("data:text/plain;base64,QUJD", "must start with 'data:image/<format>;base64,'"),
            (None, "found NoneType"),
            (17, "found int"),
            ([1], "found list"),
            (b"path.png", "is not an image"),
            (Image.new("RGB", (0, 5)), "the Pillow image is 0x5"),
        ],
    )
    def test_unusable_sources_are_refused_by_name(self, source, message):
        with pytest.raises(InputError, match=message):
            load_image(source)

    def test_empty_and_unreadable_files(self, tmp_path):
        path = tmp_path / "empty.png"
        path.touch()
        with pytest.raises(InputError, match=r"empty\.png' is empty"):
            load_image(path)
        with pytest.raises(InputError, match="must be text, found bytes"):
            load_frames(BytesPath(path))
        with pytest.raises(InputError, match="must be text, found bytes"):
            load_image(BytesPath(path))


class TestColours:
    @settings(max_examples=80, deadline=None)
    @given(
        mode=st.sampled_from(
            [
                "1",
                "L",
                "LA",
                "P",
                "PA",
                "RGB",
                "RGBA",
                "RGBa",
                "RGBX",
                "CMYK",
                "YCbCr",
                "LAB",
                "HSV",
            ]
        ),
        width=st.integers(1, 20),
        height=st.integers(1, 20),
        seed=st.integers(0, 99),
    )
    def test_modes_convert_as_in_reference(self, mode, width, height, seed):
        bands = len(Image.new(mode, (1, 1)).getbands())
        raw = random_pixels(height, width, bands, seed=seed).tobytes()
        image = Image.frombytes(
            mode, (width, height), raw[: height * ((width + 7) // 8)] if mode == "1" else raw
        )
        if mode in ("P", "PA"):
            image.putpalette(random_pixels(256, 3, seed=seed).tobytes())
        expected = convert_to_rgb(image, return_numpy=True)
        np.testing.assert_array_equal(np.asarray(load_image(image)), expected)

    @pytest.mark.filterwarnings("ignore:Palette images with Transparency")
    @pytest.mark.parametrize("transparency", [7, bytes(range(256))])
    def test_transparent_palette_is_put_on_white_as_in_reference(self, transparency):
        image = Image.fromarray(random_pixels(16, 16)).convert("P")
        image.putpalette(random_pixels(256, 3).tobytes())
        image.info["transparency"] = transparency
        expected = convert_to_rgb(image, return_numpy=True)
        assert not np.array_equal(expected, np.asarray(image.convert("RGB")))
        np.testing.assert_array_equal(np.asarray(load_image(image)), expected)
        data = encoded(image)
        expected = convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True)
        np.testing.assert_array_equal(np.asarray(load_image(data)), expected)

    @settings(max_examples=40, deadline=None)
    @given(
        channels=st.sampled_from([1, 3, 4]),
        width=st.integers(5, 20),
        height=st.integers(5, 20),
        seed=st.integers(0, 99),
    )
    def test_arrays_convert_as_in_reference(self, channels, width, height, seed):
        array = random_pixels(height, width, channels, seed=seed)
        expected = convert_to_rgb(array, return_numpy=True, input_data_format="channels_last")
        np.testing.assert_array_equal(np.asarray(load_image(array)), expected)
        if channels == 1:
            np.testing.assert_array_equal(np.asarray(load_image(array[:, :, 0])), expected)

    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
    def test_exif_orientation_is_applied_as_in_reference(self, orientation, format_, tmp_path):
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = tmp_path / "turned"
        path.write_bytes(encoded(Image.fromarray(random_pixels(8, 24, 3)), format_, exif=exif))
        expected = reference_load_image(str(path))
        assert expected.size == ((24, 8) if orientation < 5 else (8, 24))
        for source in (path, Image.open(path)):
            np.testing.assert_array_equal(np.asarray(load_image(source)), np.asarray(expected))

    @pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint16", "bool", "int8"])
    def test_other_array_types_are_refused_by_name(self, dtype):
        with pytest.raises(InputError, match=f"must be uint8 .*found {dtype} of shape"):
            load_image(np.zeros((4, 4, 3), dtype))

    @pytest.mark.parametrize("shape", [(4,), (4, 4, 2), (3, 4, 5), (1, 4, 4, 3), (0, 4, 3), (4, 0)])
    def test_other_array_shapes_are_refused_by_name(self, shape):
        with pytest.raises(InputError, match="must have shape"):
            load_image(np.zeros(shape, np.uint8))

    @pytest.mark.parametrize("mode", ["I", "F", "I;16", "I;16B", "I;16L"])
    def test_more_than_8_bits_are_refused_because_pillow_would_clip_them(self, mode, tmp_path):
        with pytest.raises(InputError, match=f"8 bits a channel, but .* has mode '{mode}'"):
            load_image(Image.new(mode, (4, 4)))
        path = tmp_path / "deep.png"
        Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(path)
        with pytest.raises(InputError, match=r"deep\.png' has mode 'I;16'"):
            load_image(path)


def test_orientation_is_read_before_transparency_is_dropped():
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.fromarray(random_pixels(8, 24, 4))
    data = encoded(image, "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    expected = convert_to_rgb(upright, return_numpy=True)
    np.testing.assert_array_equal(np.asarray(load_image(data)), expected)
