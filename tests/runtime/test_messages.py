"""Messages: every spelling that is accepted, and every refusal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qwen3vl_export.errors import InputError
from qwen3vl_runtime.messages import (
    ImagePart,
    Message,
    TextPart,
    VideoPart,
    parse_messages,
    visual_parts,
)


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def only_part(part: dict[str, Any]) -> Any:
    return parse_messages(user(part))[0].parts[0]


def test_string_content_is_one_text_part() -> None:
    messages = parse_messages([{"role": "system", "content": ""}, {"role": "user", "content": "a"}])
    assert messages == (
        Message("system", (TextPart(""),), is_plain=True),
        Message("user", (TextPart("a"),), is_plain=True),
    )


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "cat.png"},
        {"type": "image", "image_url": "cat.png"},
        {"type": "image_url", "image_url": "cat.png"},
        {"type": "image_url", "image_url": {"url": "cat.png"}},
        {"type": "image_url", "image_url": {"url": "cat.png", "detail": "auto"}},
        {"image": "cat.png"},
        {"image_url": {"url": "cat.png"}},
    ],
)
def test_every_spelling_of_an_image(part: dict[str, Any]) -> None:
    image = only_part({**part, "min_pixels": 4, "max_pixels": 9})
    assert isinstance(image, ImagePart)
    assert (image.source, image.min_pixels, image.max_pixels) == ("cat.png", 4, 9)
    assert image.features is None


def test_ignored_detail_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    only_part({"type": "image_url", "image_url": {"url": "x", "detail": "low"}})
    assert "messages[0].content[0].image_url.detail 'low'" in caplog.text


def test_video_options_and_raw_sources() -> None:
    frames = [np.zeros((2, 2, 3), np.uint8)]
    video = only_part(
        {"video": frames, "fps": 2, "raw_fps": 30.0, "do_sample_frames": False, "max_pixels": 8}
    )
    assert isinstance(video, VideoPart)
    assert video.source is frames
    assert (video.fps, video.raw_fps, video.do_sample_frames) == (2.0, 30.0, False)
    assert (video.num_frames, video.min_pixels, video.max_pixels) == (None, None, 8)


def test_features_of_image_and_video() -> None:
    embeds = np.ones((4, 6), np.float16)
    image = only_part({"type": "image", "image_embeds": embeds, "image_grid_thw": [1, 4, 4]})
    assert isinstance(image, ImagePart)
    assert image.source is None
    assert image.features is not None
    assert image.features.embeds is embeds
    assert image.features.grid_thw == (1, 4, 4)
    video = only_part(
        {"video_embeds": embeds, "video_grid_thw": np.array([2, 2, 4]), "timestamps": [0, 1.5]}
    )
    assert isinstance(video, VideoPart)
    assert video.features is not None
    assert (video.features.grid_thw, video.features.timestamps) == ((2, 2, 4), (0.0, 1.5))


def test_visual_parts_keep_order() -> None:
    messages = parse_messages(
        [
            *user({"image": "a"}, {"text": "x"}, {"video": "b"}),
            {"role": "assistant", "content": "ok"},
            *user({"image": "c"}),
        ]
    )
    assert [part.source for part in visual_parts(messages)] == ["a", "b", "c"]


EMBEDS = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages is empty"),
        ("hi", "messages must be a list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": None}], r"messages\[0\].content"),
        ([{"role": "user", "content": []}], r"messages\[0\].content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": "developer", "content": "x"}], "'developer'"),
        ([{"role": "user", "content": "x"}, {"role": ["a"], "content": "x"}], r"messages\[1\]"),
        ([{"role": "user", "content": "x", "name": "y"}], "unknown key 'name'"),
        (user("x"), r"content\[0\] must be an object"),
        (user({"text": "a"}, {"type": "audio", "audio": "x"}), r"content\[1\].type .*'audio'"),
        (user({"type": ["image"], "image": "x"}), r"content\[0\].type"),
        (user({"type": "text", "text": 3}), r"content\[0\].text must be a string"),
        (user({"type": "text"}), "exactly one of text, found none"),
        (user({"type": "text", "text": "x", "image": "y"}), "found text, image"),
        (user({"text": "x", "image": "y"}), "found text, image"),
        (user({"type": "image", "image": "a", "image_url": "b"}), "found image, image_url"),
        (user({"type": "image_url", "image": "a"}), "exactly one of image_url, found image"),
        (user({}), "found none of them"),
        (user({"image": None}), r"content\[0\].image must be"),
        (user({"image": ""}), r"content\[0\].image must be"),
        (user({"video": []}), r"content\[0\].video must be"),
        (user({"image": 3}), r"content\[0\].image must be"),
        (user({"image_url": {"href": "x"}}), "unknown key 'href'"),
        (user({"image_url": {"detail": "auto"}}), r"image_url must be"),
        (user({"image_url": {"url": "x", "detail": "huge"}}), "detail must be"),
        (user({"image": "x", "fps": 2}), "unknown key 'fps'"),
        (user({"image": "x", "maxpixels": 2}), "unknown key 'maxpixels'"),
        (user({"image": "x", "max_pixels": 0}), "max_pixels must be a positive integer"),
        (user({"image": "x", "max_pixels": True}), "max_pixels must be"),
        (user({"image": "x", "max_pixels": 4.0}), "max_pixels must be"),
        (user({"image": "x", "max_pixels": None}), "max_pixels must be"),
        (user({"image": "x", "min_pixels": 9, "max_pixels": 4}), "min_pixels 9 must not exceed"),
        (user({"video": "x", "fps": "2"}), "fps must be a number above zero"),
        (user({"video": "x", "fps": float("nan")}), "fps must be"),
        (user({"video": "x", "raw_fps": float("inf")}), "raw_fps must be"),
        (user({"video": "x", "num_frames": 2.5}), "num_frames must be"),
        (user({"video": "x", "fps": 1, "num_frames": 2}), "both fps and num_frames"),
        (user({"video": "x", "do_sample_frames": 1}), "do_sample_frames must be"),
        (user({"image_embeds": EMBEDS}), "image_grid_thw must be three"),
        (user({"image_embeds": EMBEDS, "image_grid_thw": [1, 2]}), "image_grid_thw must be"),
        (user({"image_embeds": EMBEDS, "image_grid_thw": [1, 0, 2]}), "image_grid_thw must be"),
        (user({"image_embeds": EMBEDS[0], "image_grid_thw": [1, 2, 2]}), r"shape \[3\]"),
        (user({"image_embeds": EMBEDS.astype(int), "image_grid_thw": [1, 2, 2]}), "int64"),
        (
            user({"image_embeds": [[1.0], [1.0, 2.0]], "image_grid_thw": [1, 2, 2]}),
            "floating-point",
        ),
        (user({"image_embeds": EMBEDS * np.nan, "image_grid_thw": [1, 2, 2]}), "found NaN"),
        (user({"image_embeds": EMBEDS[:0], "image_grid_thw": [1, 2, 2]}), r"shape \[0, 3\]"),
        (
            user({"image_embeds": EMBEDS, "image_grid_thw": [1, 2, 2], "max_pixels": 4}),
            "unknown key 'max_pixels'",
        ),
        (user({"video_embeds": EMBEDS, "video_grid_thw": [2, 2, 2]}), "timestamps must be 2"),
        (
            user({"video_embeds": EMBEDS, "video_grid_thw": [2, 2, 2], "timestamps": [1, -1]}),
            "timestamps must be 2",
        ),
        (
            user({"video_embeds": EMBEDS, "video_grid_thw": [1, 2, 2], "timestamps": [1e300]}),
            "timestamps must be 1",
        ),
        (None, "messages must be a list"),
        ((message for message in user({"text": "x"})), "messages must be a list"),
    ],
)
def test_refusals_name_the_place(messages: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        parse_messages(messages)
