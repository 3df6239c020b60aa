"""The processor files of a bundle: those transformers would use, and none that cannot work."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoImageProcessor
from transformers.video_processing_utils import BaseVideoProcessor

from qwen3vl_export.checkpoint import Checkpoint
from qwen3vl_export.config import ModelConfig
from qwen3vl_export.errors import CheckpointError
from qwen3vl_export.pipeline import _copy_processor

_KEYS = {
    "preprocessor_config.json": "image_processor",
    "video_preprocessor_config.json": "video_processor",
}


@pytest.fixture
def source(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("tied"), tmp_path / "checkpoint"))


def copy(source: Path) -> Path:
    """Copy the files as an export does; returns their folder."""
    bundle = source.parent / "bundle"
    bundle.mkdir()
    _copy_processor(source, bundle, ModelConfig.from_dict(Checkpoint.open(source).config))
    return bundle / "processor"


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def theirs(source: Path) -> dict[str, Any]:
    """The settings of transformers' image processor."""
    settings: dict[str, Any] = AutoImageProcessor.from_pretrained(source).to_dict()
    return settings


def test_the_nested_preprocessor_wins_as_in_transformers(source: Path) -> None:
    nested = {
        key: read(source / name) | {"size": {"shortest_edge": 7777, "longest_edge": 88888}}
        for name, key in _KEYS.items()
    }
    (source / "processor_config.json").write_text(json.dumps(nested), encoding="utf-8")
    processor = copy(source)
    for name, key in _KEYS.items():
        assert read(processor / name) == nested[key]
    assert theirs(source)["size"] == nested["image_processor"]["size"]
    # Its video processor itself needs torchvision.
    assert BaseVideoProcessor.get_video_processor_dict(source)[0] == nested["video_processor"]


@pytest.mark.parametrize("name", _KEYS)
def test_a_processor_config_without_the_entry_leaves_it_to_the_file(
    source: Path, name: str
) -> None:
    nested = {"processor_class": "Qwen3VLProcessor", _KEYS[name]: None}
    (source / "processor_config.json").write_text(json.dumps(nested), encoding="utf-8")
    assert read(copy(source) / name) == read(source / name)


@pytest.mark.parametrize("name", _KEYS)
@pytest.mark.parametrize("key", ["patch_size", "temporal_patch_size", "merge_size"])
def test_a_size_that_differs_from_the_vision_encoder_is_refused(
    source: Path, name: str, key: str
) -> None:
    changed = read(source / name)
    changed[key] += 1
    (source / name).write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"{name} has {key} \d+, but the vision encoder"):
        copy(source)


def test_a_size_left_out_is_what_transformers_takes(source: Path) -> None:
    """Its image processor is Qwen2-VL's, whose patches are smaller; the video's are not."""
    for name in _KEYS:
        changed = read(source / name)
        del changed["patch_size"]
        (source / name).write_text(json.dumps(changed), encoding="utf-8")
    assert theirs(source)["patch_size"] == 14
    with pytest.raises(
        CheckpointError,
        match=r"/preprocessor_config.json has patch_size 14 \(the default\), but .* needs 16",
    ):
        copy(source)


def test_a_preprocessor_that_is_no_object_is_refused(source: Path) -> None:
    (source / "processor_config.json").write_text('{"image_processor": []}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"'image_processor' in .* must be a JSON object"):
        copy(source)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer.json", r"tokenizer.json is no readable tokenizer \("),
        ("tokenizer_config.json", "tokenizer_config.json is not readable JSON"),
        ("generation_config.json", "generation_config.json is not readable JSON"),
        ("chat_template.json", "chat_template.json is not readable JSON"),
    ],
)
def test_a_broken_file_is_found_at_export(source: Path, name: str, message: str) -> None:
    (source / name).write_text('{"version": ', encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        copy(source)


def test_a_tokenizer_that_is_larger_than_the_vocabulary_is_refused(source: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    config = ModelConfig.from_dict(Checkpoint.open(source).config)
    for vocab_size in (size, size - 1):
        text = dataclasses.replace(config.text, vocab_size=vocab_size)
        model = dataclasses.replace(config, text=text)
        bundle = source.parent / str(vocab_size)
        bundle.mkdir()
        if vocab_size == size:
            _copy_processor(source, bundle, model)
            continue
        with pytest.raises(
            CheckpointError, match=rf"has the token {size - 1}, but .* vocab_size of {vocab_size}"
        ):
            _copy_processor(source, bundle, model)
