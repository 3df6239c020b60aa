"""Prompt layout: token ids, visual indices and spans, against transformers' own processor."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.errors import BundleError, InputError
from qwen3vl_runtime.chat_template import ChatTemplate
from qwen3vl_runtime.messages import parse_messages
from qwen3vl_runtime.prompt import Visual, layout_prompt
from qwen3vl_runtime.tokenizer import Tokenizer
from qwen3vl_tools.tiny import CHECKPOINT_DIR

CONFIG = ModelConfig.from_dict(json.loads((CHECKPOINT_DIR / "config.json").read_text()))
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"

EVEN = st.integers(1, 3).map(lambda n: 2 * n)
IMAGES = st.builds(lambda h, w: Visual("image", (1, h, w)), EVEN, EVEN)


@st.composite
def videos(draw: st.DrawFn) -> tuple[Visual, VideoMetadata]:
    """A video with the timestamps transformers derives from its frame indices and rate."""
    t = draw(st.integers(1, 3))
    fps = draw(st.sampled_from([1.0, 2.0, 23.976, 30.0]))
    indices = sorted(draw(st.lists(st.integers(0, 500), min_size=2 * t, max_size=2 * t)))
    times = tuple((indices[2 * i] / fps + indices[2 * i + 1] / fps) / 2 for i in range(t))
    metadata = VideoMetadata(total_num_frames=501, fps=fps, frames_indices=indices)
    return Visual("video", (t, draw(EVEN), draw(EVEN)), times), metadata


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_processor_files(CHECKPOINT_DIR)


@pytest.fixture(scope="module")
def processor() -> Any:
    """Transformers' processor without its pixel half, which would need torchvision."""
    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    processor.tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT_DIR)
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    processor.image_processor = SimpleNamespace(merge_size=2)
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    return processor


def expand_like_processor(
    processor: Any, text: str, visuals: list[Visual], metadata: list[VideoMetadata]
) -> str:
    """The text with its placeholders replaced by transformers' processor."""
    images = torch.tensor([v.grid_thw for v in visuals if v.kind == "image"])
    films = torch.tensor([v.grid_thw for v in visuals if v.kind == "video"])
    video_inputs = {"video_grid_thw": films, "video_metadata": metadata}
    expanded, _ = processor.get_text_with_replacements(
        [text],
        [processor.replace_image_token({"image_grid_thw": images}, i) for i in range(len(images))],
        [processor.replace_video_token(video_inputs, i) for i in range(len(films))],
    )
    return str(expanded[0])


@settings(max_examples=60, deadline=None)
@given(
    items=st.lists(
        st.one_of(
            IMAGES,
            videos(),
            st.text(max_size=8),
            st.sampled_from(["Zeit 1.5 <2.0 seconds>", "<|vision_start|>", "\n\n"]),
        ),
        max_size=6,
    ),
    wrapped=st.booleans(),
)
def test_ids_equal_transformers_expansion(
    tokenizer: Tokenizer, processor: Any, items: list[Any], wrapped: bool
) -> None:
    pieces: list[str] = ["<|im_start|>user\n"]
    visuals, metadata = [], []
    for item in items:
        if isinstance(item, str):
            pieces.append(item)
            continue
        visual = item if isinstance(item, Visual) else item[0]
        visuals.append(visual)
        if visual.kind == "video":
            metadata.append(item[1])
            # A bare token next to a vision_start of the user's text would look like a pair.
            pieces.append(VIDEO if wrapped else "video: <|video_pad|>")
        else:
            pieces.append(IMAGE)
    text = "".join(pieces)
    layout = layout_prompt(text, visuals, tokenizer, CONFIG)
    # The installed release replaces the bare video token. Those that Qwen3-VL was trained with
    # replaced its outer pair too, which is the same as taking the pair away first.
    bare = text.replace(VIDEO, "<|video_pad|>")
    expected = expand_like_processor(processor, bare, visuals, metadata)
    assert layout.input_ids.tolist() == processor.tokenizer(expected).input_ids
    check_consistency(layout, visuals)


def check_consistency(layout: Any, visuals: list[Visual]) -> None:
    ids, indices, types = layout.input_ids, layout.visual_indices, layout.token_types
    assert ids.dtype == indices.dtype == types.dtype == np.int64
    assert ids.shape == indices.shape == types.shape
    np.testing.assert_array_equal(types == 1, ids == CONFIG.image_token_id)
    np.testing.assert_array_equal(types == 2, ids == CONFIG.video_token_id)
    np.testing.assert_array_equal(indices < 0, types == 0)
    rows = [i for span in layout.spans for i in indices[span.start : span.end].tolist()]
    assert rows == list(range(layout.num_visual_tokens))
    assert layout.num_visual_tokens == sum(np.prod(v.grid_thw) // 4 for v in visuals)
    expected = [
        (i, v.kind, frame)
        for i, v in enumerate(visuals)
        for frame in range(v.grid_thw[0] if v.kind == "video" else 1)
    ]
    assert [(s.visual, s.kind, s.frame) for s in layout.spans] == expected
    for span in layout.spans:
        assert set(types[span.start : span.end].tolist()) == {1 if span.kind == "image" else 2}


def test_video_spans_equal_the_installed_release(tokenizer: Tokenizer, processor: Any) -> None:
    """Transformers 5.24 keeps the outer pair of vision tokens; the spans inside are the same."""
    indices = [0, 7, 20, 31, 44, 60]
    metadata = VideoMetadata(total_num_frames=61, fps=10.0, frames_indices=indices)
    visual = Visual(
        "video", (3, 4, 6), tuple((indices[i] + indices[i + 1]) / 20 for i in (0, 2, 4))
    )
    text = f"<|im_start|>user\nwatch {VIDEO} now<|im_end|>\n"
    layout = layout_prompt(text, [visual], tokenizer, CONFIG)
    ours = tokenizer.decode(layout.input_ids.tolist(), skip_special_tokens=False)
    theirs = expand_like_processor(processor, text, [visual], [metadata])
    assert theirs == ours.replace("watch <", "watch <|vision_start|><").replace(
        "<|vision_end|> now", "<|vision_end|><|vision_end|> now"
    )
    assert [ours[m.start() : m.end()] for m in re.finditer(r"<[0-9.]+ seconds>", ours)] == [
        "<0.3 seconds>",
        "<2.5 seconds>",
        "<5.2 seconds>",
    ]


def test_conversation_end_to_end(tokenizer: Tokenizer) -> None:
    messages = parse_messages(
        [
            {"role": "user", "content": [{"image": "a"}, {"text": "?"}, {"video": "b"}]},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": [{"image_url": "c"}]},
        ]
    )
    text = ChatTemplate.from_processor_files(CHECKPOINT_DIR).render(messages)
    visuals = [
        Visual("image", (1, 2, 4)),
        Visual("video", (2, 2, 2), (0.25, 1.0)),
        Visual("image", (1, 4, 4)),
    ]
    layout = layout_prompt(text, visuals, tokenizer, CONFIG)
    check_consistency(layout, visuals)
    assert [span.end - span.start for span in layout.spans] == [2, 1, 1, 4]
    decoded = tokenizer.decode(layout.input_ids.tolist(), skip_special_tokens=False)
    video = "<{} seconds><|vision_start|><|video_pad|><|vision_end|>"
    assert f"?{video.format(0.2)}{video.format(1.0)}<|im_end|>" in decoded


def test_arrays_are_read_only(tokenizer: Tokenizer) -> None:
    layout = layout_prompt("x", [], tokenizer, CONFIG)
    for array in (layout.input_ids, layout.visual_indices, layout.token_types):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


PICTURE = Visual("image", (1, 2, 2))
FILM = Visual("video", (1, 2, 2), (0.0,))


@pytest.mark.parametrize(
    ("text", "visuals", "named"),
    [
        ("", [], "prompt is empty"),
        ("x", [PICTURE], "0 image and 0 video placeholders for 1 images and 0 videos"),
        (IMAGE, [], "1 image and 0 video placeholders for 0 images and 0 videos"),
        (IMAGE, [PICTURE] * 2, "1 image and 0 video placeholders for 2 images"),
        (f"I typed <|image_pad|> {IMAGE}", [PICTURE], "2 image and 0 video"),
        (f"{VIDEO} {IMAGE}", [PICTURE], "1 image and 1 video placeholders for 1 images and 0"),
        (VIDEO, [PICTURE], "0 image and 1 video placeholders for 1 images and 0"),
        (f"{VIDEO}{IMAGE}", [PICTURE, FILM], "another order"),
        (IMAGE, [Visual("image", (1, 3, 2))], "multiples of 2"),
        (IMAGE, [Visual("image", (0, 2, 2))], "positive grid"),
        (IMAGE, [Visual("image", (1, 2, 2), (0.0,))], "must have 0 timestamps, found 1"),
        (VIDEO, [Visual("video", (2, 2, 2), (0.0,))], "must have 2 timestamps, found 1"),
        (VIDEO, [Visual("video", (1, 2, 2), (float("nan"),))], "finite"),
        (VIDEO, [Visual("video", (1, 2, 2), (-1.0,))], "not negative"),
        (IMAGE, [Visual("audio", (1, 2, 2))], "found 'audio'"),  # type: ignore[arg-type]
    ],
)
def test_refusals(tokenizer: Tokenizer, text: str, visuals: list[Visual], named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        layout_prompt(text, visuals, tokenizer, CONFIG)


@pytest.mark.parametrize("token_id", [447, 5000])
def test_config_of_another_tokenizer_is_refused(tokenizer: Tokenizer, token_id: int) -> None:
    config = replace(CONFIG, video_token_id=token_id)
    with pytest.raises(BundleError, match=f"video_token_id {token_id}"):
        layout_prompt("x", [], tokenizer, config)
