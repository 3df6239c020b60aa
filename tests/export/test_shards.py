"""Which files of a checkpoint folder hold its weights: those that transformers would read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLForConditionalGeneration

from qwen3vl_export.checkpoint import Checkpoint
from qwen3vl_export.errors import CheckpointError

_EMBEDDING = "model.language_model.embed_tokens.weight"
_INDEX = "model.safetensors.index.json"


def test_one_whole_file_wins_over_an_index_as_in_transformers(folder: Path) -> None:
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    tensors[_EMBEDDING] = torch.zeros_like(tensors[_EMBEDDING])
    save_file(tensors, folder / "model.safetensors")
    with Checkpoint.open(folder).tensor(_EMBEDDING) as tensor:
        assert not tensor.any()
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    assert not model.get_input_embeddings().weight.any()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../other/model.safetensors", "names a shard outside the checkpoint folder: '../other"),
        ("/model.safetensors", "names a shard outside the checkpoint folder: '/model.saf"),
        ("x" * 300, "cannot be read: .*File name too long"),
    ],
)
def test_a_shard_that_can_be_no_file_of_the_folder_is_refused(
    folder: Path, name: str, message: str
) -> None:
    (folder / _INDEX).write_text(json.dumps({"weight_map": {"a": name}}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(folder)
