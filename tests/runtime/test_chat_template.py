"""The chat template against transformers, and its failures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from qwen3vl_export.errors import BundleError, InputError
from qwen3vl_runtime.chat_template import ChatTemplate
from qwen3vl_runtime.messages import parse_messages
from qwen3vl_tools.tiny import CHECKPOINT_DIR

# The features of a full-size Qwen3-VL template: running picture counts, tool responses grouped
# by their neighbours, a loop that is left early, and whitespace that only trimming removes.
FULL_TEMPLATE = """
{%- set counts = namespace(images=0, videos=0) %}
{%- if tools %}{{- raise_exception('no tools') }}{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- for c in messages[0].content %}
        {%- if loop.index > 2 %}{%- break %}{%- endif %}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
    {%- endif %}
    {% generation %}
    {%- if message.content is string %}
        {{- message.content | trim }}
    {%- else %}
        {%- for c in message.content %}
            {%- if c.type == 'image' or 'image' in c or 'image_url' in c %}
                {%- set counts.images = counts.images + 1 %}
                {%- if add_vision_id %}Picture {{ counts.images }}: {% endif -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif c.type == 'video' or 'video' in c %}
                {%- set counts.videos = counts.videos + 1 %}
                {%- if add_vision_id %}Video {{ counts.videos }}: {% endif -%}
                <|vision_start|><|video_pad|><|vision_end|>
            {%- elif 'text' in c %}
                {{- c.text }}{{ c | tojson }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {% endgeneration %}
    {{- '<|im_end|>\\n' }}{{ dict(a=1) | tojson(indent=2) }}
    {{ eos_token }}{{ bos_token is defined }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT_DIR)


@pytest.fixture(scope="module")
def tiny_template() -> ChatTemplate:
    return ChatTemplate.from_processor_files(CHECKPOINT_DIR)


TEXTS = st.text(max_size=12) | st.sampled_from(["<b>&'\"", "\n x \n", "<|im_end|>", "{{ 1 }}"])
PARTS = st.one_of(
    TEXTS.map(lambda text: {"type": "text", "text": text}),
    TEXTS.map(lambda text: {"type": "text", "text": text}),
    st.sampled_from(
        [
            {"type": "image", "image": "a.png"},
            {"type": "image_url", "image_url": {"url": "http://x"}},
            {"image": np.zeros((1, 1, 3), np.uint8), "max_pixels": 4},
            {"type": "video", "video": "a.mp4", "fps": 2},
            {"video": ["a.png", "b.png"]},
        ]
    ),
)
CONVERSATIONS = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool"]),
            "content": TEXTS | st.lists(PARTS, min_size=1, max_size=4),
        }
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(conversation=CONVERSATIONS, add_generation_prompt=st.booleans(), vision_id=st.booleans())
def test_rendering_equals_transformers(
    hf_tokenizer: Any,
    tiny_template: ChatTemplate,
    conversation: list[dict[str, Any]],
    add_generation_prompt: bool,
    vision_id: bool,
) -> None:
    messages = parse_messages(conversation)
    variables = {"add_vision_id": vision_id}
    full_template = ChatTemplate(FULL_TEMPLATE, hf_tokenizer.special_tokens_map)
    for template, source in ((tiny_template, None), (full_template, FULL_TEMPLATE)):
        expected = hf_tokenizer.apply_chat_template(
            conversation,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        rendered = template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        assert rendered == expected


def test_features_render_as_their_kind(tiny_template: ChatTemplate) -> None:
    part = {"image_embeds": np.ones((1, 3), np.float32), "image_grid_thw": [1, 2, 2]}
    text = tiny_template.render(parse_messages(user(part)), add_generation_prompt=False)
    assert "<|vision_start|><|image_pad|><|vision_end|>" in text


def test_template_files_in_order_of_precedence(tmp_path: Path) -> None:
    messages = parse_messages([{"role": "user", "content": "x"}])

    def rendered() -> str:
        return ChatTemplate.from_processor_files(tmp_path).render(messages)

    with pytest.raises(BundleError, match="expected a chat template"):
        rendered()
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "config{{ eos_token }}", "eos_token": "E"}))
    assert rendered() == "configE"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "default"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert rendered() == "default"
    config.write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(BundleError, match=r"tokenizer_config\.json"):
        rendered()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert rendered() == "json"
    shutil.copy(CHECKPOINT_DIR / "chat_template.jinja", tmp_path)
    assert rendered().startswith("<|im_start|>user\nx")
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(BundleError, match="syntax error in line 1"):
        rendered()
    (tmp_path / "chat_template.jinja").write_text("{{" + "(" * 5000 + ")" * 5000 + "}}")
    with pytest.raises(BundleError, match="cannot be compiled"):
        rendered()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(BundleError, match="expected a text file"):
        rendered()


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('only one turn') }}", "only one turn"),
        ("{{ 'a' + messages[0].content }}", "TypeError"),
        ("{{ messages[0].role.__class__.__mro__ }}", "SecurityError"),
        ("{% set n = namespace(_x=1) %}{{ n._x }}", "'_x'"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ dict.mro() }}", "UndefinedError"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        ("{{ 'a' * 10**13 }}", "MemoryError"),
        ("{{ 1 | items | list }}", "TypeError"),
    ],
)
def test_template_failures_are_input_errors(source: str, named: str) -> None:
    messages = parse_messages(user({"text": "x"}))
    with pytest.raises(InputError, match=named):
        ChatTemplate(source).render(messages)


def test_reserved_variables_are_refused(tiny_template: ChatTemplate) -> None:
    with pytest.raises(InputError, match="'tools' is reserved"):
        tiny_template.render(parse_messages(user({"text": "x"})), variables={"tools": []})
