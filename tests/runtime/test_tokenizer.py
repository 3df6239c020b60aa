"""Tokenizer and streaming decoder against transformers and against the whole decode."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GenerationConfig

from qwen3vl_export.errors import BundleError, InputError
from qwen3vl_runtime.tokenizer import StreamingDecoder, Tokenizer
from qwen3vl_tools.tiny import CHECKPOINT_DIR

TEXTS = st.lists(
    st.text(max_size=10)
    | st.sampled_from(
        [
            "<|im_start|>",
            "<|image_pad|>",
            "<|endoftext|>",
            "<|im_",
            "e\u0301",
            "👩‍👩‍👧",
            " don't\r\n\n",
        ]
    ),
    max_size=6,
).map("".join)
NUM_TOKENS = 424


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_processor_files(CHECKPOINT_DIR)


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT_DIR)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(CHECKPOINT_DIR / name, tmp_path / name)
    return tmp_path


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool) -> list[str]:
    decoder = StreamingDecoder(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(decoder.push(i) for i in ids), decoder.finish()]


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_encode_equals_transformers(tokenizer: Tokenizer, hf_tokenizer: Any, text: str) -> None:
    assert tokenizer.encode(text) == hf_tokenizer(text).input_ids


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, NUM_TOKENS + 20), max_size=30), skip=st.booleans())
def test_decode_equals_transformers(
    tokenizer: Tokenizer, hf_tokenizer: Any, ids: list[int], skip: bool
) -> None:
    expected = hf_tokenizer.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, NUM_TOKENS + 20), max_size=40), skip=st.booleans())
def test_stream_of_any_ids_equals_whole_decode(
    tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    joined = "".join(stream(tokenizer, ids, skip_special_tokens=skip))
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_stream_of_text_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    chunks = stream(tokenizer, ids, skip_special_tokens=False)
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(chunks) == whole
    assert sum(chunk.count("\ufffd") for chunk in chunks) == whole.count("\ufffd")
    assert chunks[-1] == ""


def test_stream_gives_a_character_as_soon_as_it_is_complete(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀b")
    chunks = stream(tokenizer, ids, skip_special_tokens=False)
    assert [chunk for chunk in chunks if chunk] == ["a", "😀", "b"]
    assert len(chunks) > 4  # the character takes several tokens, and waits for the last of them


def test_unfinished_character_is_replaced_once_and_stream_restarts(tokenizer: Tokenizer) -> None:
    first_byte = tokenizer.encode("😀")[0]
    decoder = StreamingDecoder(tokenizer)
    assert decoder.push(first_byte) == ""
    assert decoder.finish() == tokenizer.decode([first_byte]) == "\ufffd"
    assert decoder.push(tokenizer.encode("a")[0]) + decoder.finish() == "a"


def test_every_added_token_streams_like_it_decodes() -> None:
    backend = tokenizers.Tokenizer.from_file(str(CHECKPOINT_DIR / "tokenizer.json"))
    backend.add_tokens(["two words", "é", "日本", "<think>"])
    tokenizer = Tokenizer(backend, [0])
    for token_id in range(tokenizer.num_tokens):
        for ids in ([token_id], [token_id, 5, token_id]):
            joined = "".join(stream(tokenizer, ids, skip_special_tokens=False))
            assert joined == tokenizer.decode(ids, skip_special_tokens=False)


def test_special_tokens_of_the_checkpoint(tokenizer: Tokenizer, hf_tokenizer: Any) -> None:
    generation = GenerationConfig.from_pretrained(CHECKPOINT_DIR)
    assert tokenizer.eos_token_ids == tuple(generation.eos_token_id)
    assert tokenizer.pad_token_id == hf_tokenizer.pad_token_id
    assert tokenizer.num_tokens == len(hf_tokenizer)
    assert tokenizer.id_to_token(422) == "<|image_pad|>"
    assert tokenizer.token_to_id("<|image_pad|>") == 422
    assert tokenizer.id_to_token(NUM_TOKENS) is None
    assert tokenizer.token_to_id("no such token") is None


def test_eos_and_pad_sources(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[412, 410])
    assert Tokenizer.from_processor_files(folder).eos_token_ids == (412, 410)
    edit_json(folder / "tokenizer_config.json", pad_token=None)
    edit_json(folder / "generation_config.json", eos_token_id=None, pad_token_id=7)
    loaded = Tokenizer.from_processor_files(folder)
    assert (loaded.eos_token_ids, loaded.pad_token_id) == ((412,), 7)
    edit_json(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert Tokenizer.from_processor_files(folder).eos_token_ids == (410,)


def test_saved_truncation_does_not_cut_prompts(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    loaded = Tokenizer.from_processor_files(folder)
    text = "a much longer prompt than three tokens"
    assert loaded.decode(loaded.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("tokenizer.json", None, "no such file"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "[]", "JSON object"),
        ("tokenizer_config.json", "{", "JSON file"),
        ("generation_config.json", '{"eos_token_id": [412, -1]}', "ends generation"),
        ("generation_config.json", '{"eos_token_id": "x"}', "ends generation"),
        ("generation_config.json", '{"eos_token_id": []}', "ends generation"),
        ("tokenizer_config.json", '{"eos_token": "<eos>"}', "does not have"),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token must be a string"),
        ("tokenizer_config.json", '{"split_special_tokens": true}', "split_special_tokens"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"410": {"content": "<|im_end|>"}}}',
            "disagree: token 410",
        ),
    ],
)
def test_broken_files(folder: Path, name: str, content: str | None, named: str) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(BundleError, match=named):
        Tokenizer.from_processor_files(folder)


def test_no_eos_anywhere(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").unlink()
    with pytest.raises(BundleError, match="ends generation"):
        Tokenizer.from_processor_files(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 412, "pad_token_id": "x"}')
    with pytest.raises(BundleError, match="pad_token_id"):
        Tokenizer.from_processor_files(folder)


def test_other_tokenizer_kinds_are_refused() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.decoder = tokenizers.decoders.Metaspace()
    with pytest.raises(BundleError, match="byte-level"):
        Tokenizer(backend, [0])


def test_negative_ids_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="-1"):
        tokenizer.decode([3, -1])
    with pytest.raises(InputError, match="-1"):
        StreamingDecoder(tokenizer).push(-1)
