"""Loading of video frames: lists, arrays, folders and animated files, and their refusals."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from qwen3vl_export.errors import InputError
from qwen3vl_runtime.media import VideoFrames, load_frames

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]


def random_pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: Image.Image, format_: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()


def animation(format_: str, duration: object = 125, count: int = 4, **options: object) -> bytes:
    frames = [Image.new("RGB", (16, 12), COLOURS[i % 4]) for i in range(count)]
    if format_ == "WEBP":
        options["lossless"] = True
    return encoded(
        frames[0],
        format_,
        save_all=True,
        append_images=frames[1:],
        duration=duration,
        **options,
    )


def colours_of(video: VideoFrames) -> list[object]:
    return [frame.getpixel((0, 0)) for frame in video.frames]


def test_lists_arrays_and_folders(tmp_path):
    pixels = random_pixels(12, 6, 8, 3)
    for i, frame in enumerate(pixels):
        Image.fromarray(frame).save(tmp_path / f"frame{i}.png")
    (tmp_path / ".DS_Store").write_bytes(b"hidden")
    sources = [
        list(pixels),
        tuple(Image.fromarray(frame) for frame in pixels),
        [tmp_path / f"frame{i}.png" for i in range(12)],
        pixels,
        tmp_path,
        str(tmp_path),
        tmp_path.as_uri(),
    ]
    for source in sources:
        video = load_frames(source, raw_fps=12)
        assert video.fps == 12.0
        np.testing.assert_array_equal(np.stack([np.asarray(f) for f in video.frames]), pixels)
        with pytest.raises(InputError, match="pass raw_fps"):
            load_frames(source)


def test_folder_is_sorted_by_number(tmp_path):
    names = [
        "a9.png",
        "a10.png",
        "A011.png",
        "b1c2.png",
        "b1c10.png",
        "b02.png",
        "10.png",
        "2.png",
    ]
    for i, name in enumerate(names):
        Image.new("RGB", (2, 2), (i, 0, 0)).save(tmp_path / name)
    order = [names[colour[0]] for colour in colours_of(load_frames(tmp_path, raw_fps=1))]
    assert order == ["2.png", "10.png", *names[:5], "b02.png"]


@pytest.mark.parametrize("format_", ["GIF", "WEBP", "PNG"])
def test_animations(format_, tmp_path):
    data = animation(format_, 200)
    path = tmp_path / "film"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    for source in (data, path, str(path), f"data:image/x;base64,{text}"):
        video = load_frames(source)
        assert video.fps == pytest.approx(5)
        assert colours_of(video) == COLOURS
    assert load_frames(data, raw_fps=30).fps == 30
    with pytest.raises(InputError, match=r"durations of \[100.0, 200.0\] ms.*raw_fps"):
        load_frames(animation(format_, [100, 100, 200, 100]))
    uneven = load_frames(animation(format_, [100, 100, 200, 100]), raw_fps=10)
    assert colours_of(uneven) == COLOURS


def test_default_image_of_an_apng_is_no_frame():
    video = load_frames(animation("PNG", 125, default_image=True))
    assert colours_of(video) == COLOURS[1:]
    assert video.fps == 8


@pytest.mark.parametrize("data", [animation("GIF", 0), animation("TIFF")])
def test_animation_without_durations_needs_raw_fps(data):
    with pytest.raises(InputError, match="without a duration; pass raw_fps"):
        load_frames(data)
    assert len(load_frames(data, raw_fps=3).frames) == 4


def test_transparent_animation_is_put_on_white():
    frames = [Image.new("RGBA", (4, 4), (9 * i, 0, 0, 0)) for i in range(1, 3)]
    data = encoded(frames[0], "PNG", save_all=True, append_images=frames[1:], duration=100, blend=0)
    assert colours_of(load_frames(data)) == [(255, 255, 255)] * 2


def test_truncated_animation_is_refused():
    data = animation("PNG", count=8)
    with pytest.raises(InputError, match="damaged or incomplete"):
        load_frames(data[: len(data) * 2 // 3])


def test_animation_of_too_many_pixels_is_refused(monkeypatch):
    monkeypatch.setattr("qwen3vl_runtime.media.MAX_VIDEO_PIXELS", 4 * 16 * 12 - 1)
    with pytest.raises(InputError, match="4 frames of 16x12"):
        load_frames(animation("GIF"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "at least one frame, found none"),
        (np.zeros((0, 4, 4, 3), np.uint8), "at least one frame, found none"),
        (np.zeros((2, 4, 4, 3), np.float32), "found float32 of shape"),
        (np.zeros((4, 4, 3), np.uint8), r"found uint8 of shape \[4, 4, 3\]"),
        (np.zeros((2, 3, 4, 4), np.uint8), r"found uint8 of shape \[2, 3, 4, 4\]"),
        ([np.zeros((4, 4), np.uint8), "nope.png"], "frame 1 of the list: .*'nope.png'"),
        ([[np.zeros((4, 4), np.uint8)]], "frame 0 of the list: .*found list"),
        ([np.zeros((4, 4), np.uint8), np.zeros((4, 5), np.uint8)], "4x4 .* 5x4 .* at frame 1"),
        ("film.MP4", "'film.MP4' is a video file.*ffmpeg"),
        (Path("film.mkv"), "is a video file"),
        ("https://example.com/film.webm?x=1", "is a video file"),
        ("file:///film.mov", "is a video file"),
        (encoded(Image.new("RGB", (4, 4))), "still PNG image"),
        ("no-such-folder", "'no-such-folder' does not exist"),
        (Image.new("RGB", (4, 4)), "found Image"),
        (None, "found NoneType"),
    ],
)
def test_unusable_sources_are_refused_by_name(source, message):
    with pytest.raises(InputError, match=message):
        load_frames(source, raw_fps=2)


def test_unusable_folders_are_refused_by_name(tmp_path):
    with pytest.raises(InputError, match="at least one frame, found none"):
        load_frames(tmp_path, raw_fps=2)
    (tmp_path / "notes.txt").write_text("not a frame")
    with pytest.raises(InputError, match=r"notes\.txt' is not an image"):
        load_frames(tmp_path, raw_fps=2)
    (tmp_path / "notes.txt").unlink()
    (tmp_path / "more").mkdir()
    with pytest.raises(InputError, match="more' is a directory"):
        load_frames(tmp_path, raw_fps=2)


@pytest.mark.parametrize("raw_fps", [0, -1, float("nan"), float("inf"), "2", True])
def test_unusable_rate_is_refused(raw_fps):
    with pytest.raises(InputError, match="raw_fps must be a number above zero"):
        load_frames([np.zeros((4, 4), np.uint8)], raw_fps=raw_fps)
    with pytest.raises(InputError, match="raw_fps must be a number above zero"):
        load_frames(animation("GIF"), raw_fps=raw_fps)


def test_video_frames_check_themselves():
    with pytest.raises(InputError, match="mode 'L' at frame 0"):
        VideoFrames((Image.new("L", (4, 4)),), 2.0)
    with pytest.raises(InputError, match="fps of a video"):
        VideoFrames((Image.new("RGB", (4, 4)),), 0.0)
