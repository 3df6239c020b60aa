"""Text that is no path or no URL is one sentence, however long or odd it is."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from qwen3vl_export.errors import InputError
from qwen3vl_runtime.media import load_frames, load_image

Load = Callable[[str], Any]


def frames(source: str) -> Any:
    return load_frames(source, raw_fps=2)


@pytest.mark.parametrize("load", [load_image, frames])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a" * 5000, "cannot be read: File name too long"),
        ("a" * 256, "cannot be read: File name too long"),
        ("a/" * 5000, "cannot be read: File name too long"),
        ("file:///" + "a" * 5000, "cannot be read: File name too long"),
        ("a\0b", "does not exist"),
        ("\ud800", "does not exist"),
        ("//[x/frames", "does not exist"),
        ("file://[x/frames", "not a valid URL .*correct it"),
        ("data:image/gif;base64," + "A" * 5000, "not an image"),
    ],
    ids=lambda text: text[:12],
)
def test_a_source_that_is_no_path_is_explained(load: Load, source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(source)


@pytest.mark.parametrize("load", [load_image, load_frames])
def test_a_malformed_web_address_is_explained(load: Any) -> None:
    with pytest.raises(InputError, match=r"not a valid URL|cannot be fetched"):
        load("http://[x/frames", allow_urls=True)


def test_a_video_may_be_a_data_url() -> None:
    """Longer than any path may be, which is how it differs from a short one."""
    first, second = (Image.effect_noise((64, 64), 50 + 50 * i) for i in range(2))
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=[second], duration=500)
    url = "data:image/gif;base64," + base64.b64encode(buffer.getvalue()).decode()
    assert len(url) > 4096
    assert len(load_frames(url).frames) == 2
