"""Checkpoints on disk: which tensors belong to a model, and what is said about damaged folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.shapes import RANDOM_SHAPES
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from qwen3vl_export.checkpoint import Checkpoint, check_weights
from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import COMPONENTS
from qwen3vl_export.errors import CheckpointError, UnsupportedModelError
from qwen3vl_export.modules import weight_sources
from qwen3vl_tools.random_checkpoint import PRESETS, make_config

_EMBEDDING = "model.language_model.embed_tokens.weight"
_INDEX = "model.safetensors.index.json"


def shard_of(folder: Path) -> Path:
    (shard,) = folder.glob("*.safetensors")
    return shard


def check(folder: Path) -> None:
    opened = Checkpoint.open(folder)
    check_weights(opened, ModelConfig.from_dict(opened.config))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of the one shard; the index, which is then wrong, is removed."""
    tensors = load_file(shard_of(folder))
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, shard_of(folder))
    (folder / _INDEX).unlink(missing_ok=True)


@pytest.mark.parametrize(
    "config",
    [*RANDOM_SHAPES.values(), *(make_config(preset) for preset in PRESETS)],
    ids=[*RANDOM_SHAPES, *PRESETS],
)
def test_expected_tensors_are_those_of_transformers(config: dict[str, object]) -> None:
    """Name by name and shape by shape: a tensor left out would be a silently dropped feature."""
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        theirs.pop("lm_head.weight")
    parsed = ModelConfig.from_dict(config)
    ours = {
        tensor.name: tensor.shape
        for component in COMPONENTS
        for source in weight_sources(component, parsed).values()
        for tensor in source.tensors
    }
    assert ours == theirs


@pytest.mark.parametrize("name", ["trained", *RANDOM_SHAPES])
def test_good_checkpoints_pass(checkpoint: Callable[[str], Path], name: str) -> None:
    check(checkpoint(name))


def test_a_tensor_is_read_as_stored(folder: Path) -> None:
    opened = Checkpoint.open(folder)
    stored = load_file(shard_of(folder))
    assert opened.tensors.keys() == stored.keys()
    for name in (_EMBEDDING, "model.visual.patch_embed.proj.weight"):
        with opened.tensor(name) as tensor:
            assert torch.equal(tensor, stored[name])


def test_a_folder_without_an_index_is_read(folder: Path) -> None:
    (folder / _INDEX).unlink()
    check(folder)
    shard_of(folder).rename(folder / "model.safetensors")
    check(folder)


def test_a_tied_model_may_store_its_head(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"lm_head.weight": t[_EMBEDDING].clone()}))
    check(folder)


@pytest.mark.parametrize("row", [0, 447])
def test_a_tied_head_that_differs_from_the_embedding_is_refused(folder: Path, row: int) -> None:
    """Transformers would use that head."""

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors[_EMBEDDING].clone()
        tensors["lm_head.weight"][row, -1] += 1

    rewrite(folder, add_head)
    with pytest.raises(CheckpointError, match=r"says tie_word_embeddings, but lm_head.weight dif"):
        check(folder)


def test_an_untied_model_must_store_its_head(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint("untied-head72"), tmp_path / "untied"))
    rewrite(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(
        CheckpointError,
        match=r"1 missing: lm_head.weight; likely cause: the embeddings are tied, but config.json",
    ):
        check(folder)


def _drop_vision_layers(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "visual.blocks" in name]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.visual.pos_embed.weight"),
            r"do not match its config.json; 1 missing: model.visual.pos_embed.weight; "
            r"likely cause: an incomplete download or save",
        ),
        (
            _drop_vision_layers,
            r"12 missing: model.visual.blocks.0.attn.proj.bias, (\S+, ){4}\.\.\.; likely cause",
        ),
        (
            lambda t: t.update({"model.visual.blocks.7.norm1.bias": torch.ones(4)}),
            r"1 unexpected: model.visual.blocks.7.norm1.bias; likely cause: config.json describes "
            r"a smaller model than the weights",
        ),
        (
            lambda t: t.update({f"extra.{i}": torch.ones(1) for i in range(7)}),
            r"7 unexpected: extra.0, extra.1, extra.2, extra.3, extra.4, \.\.\.; likely",
        ),
        (
            lambda t: t.update({"x.lora_A.weight": torch.ones(1)}),
            "this is an adapter; merge it into its base model first",
        ),
        (
            lambda t: t.update({"x.q_proj.weight_scale_inv": torch.ones(1)}),
            "the weights are quantised; use the unquantised checkpoint",
        ),
        (
            lambda t: t.update({"visual.pos_embed": t.pop("model.visual.pos_embed.weight")}),
            "another architecture or naming; load and save it with transformers first",
        ),
        (
            lambda t: t.update({"model.visual.pos_embed.weight": torch.ones(255, 64)}),
            r"model.visual.pos_embed.weight has shape \[255, 64\], but config.json implies "
            r"\[256, 64\]; the config and the weights belong to different",
        ),
        (
            lambda t: t.update({_EMBEDDING: t[_EMBEDDING].T}),
            rf"{_EMBEDDING} has shape \[96, 448\], but config.json implies \[448, 96\]",
        ),
    ],
    ids=[
        "one-missing",
        "many-missing",
        "one-unexpected",
        "many-unexpected",
        "adapter",
        "quantised",
        "renamed",
        "shape",
        "transposed",
    ],
)
def test_differing_weights_are_counted_named_and_explained(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        check(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_weights_that_are_no_plain_floats_are_refused(folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda t: t.update({_EMBEDDING: t[_EMBEDDING].to(dtype)}))
    with pytest.raises(UnsupportedModelError, match=rf"{_EMBEDDING} is stored as \S+, expected"):
        check(folder)


def _truncate(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


@pytest.mark.parametrize("keep", [0, 0.0001, 0.5, 0.9999])
def test_a_truncated_shard_is_named(folder: Path, keep: float) -> None:
    _truncate(shard_of(folder), keep)
    with pytest.raises(
        CheckpointError, match=r"model-00000.safetensors is truncated or damaged .*download"
    ):
        Checkpoint.open(folder)


def test_a_shard_that_is_something_else_is_named(folder: Path) -> None:
    shard_of(folder).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(CheckpointError, match=r"model-00000.safetensors is truncated or damaged"):
        Checkpoint.open(folder)


def test_a_missing_shard_of_the_index_is_named(folder: Path) -> None:
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["more"] = "model-00001.safetensors"
    index["weight_map"]["yet_more"] = "model-00002.safetensors"
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"2 of 3 shards named by .* first: model-00001.safetensors; download"
    ):
        Checkpoint.open(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_an_index_without_a_map_is_refused(folder: Path, content: str) -> None:
    (folder / _INDEX).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        Checkpoint.open(folder)


def test_a_tensor_stored_twice_is_refused(folder: Path) -> None:
    """Which of the two would be read is an accident of the files' names."""
    (folder / _INDEX).unlink()
    save_file({_EMBEDDING: torch.zeros(448, 96)}, folder / "zz.safetensors")
    with pytest.raises(CheckpointError, match=rf"{_EMBEDDING} is stored in both .* and zz"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["config.json", _INDEX])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not readable JSON"),
        (b'{"model_type": "qwen3_vl"', "is not readable JSON"),
        (b"\x80abc", "is not readable JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "is not readable JSON"),
        (b'{"a":' * 200 + b"0" + b"}" * 200, "is nested more than 64 levels deep"),
        (b"[]", "must hold a JSON object, found list"),
    ],
)
def test_corrupt_json_is_named(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} {message}"):
        Checkpoint.open(folder)


def test_folders_that_are_no_checkpoint_are_explained(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a checkpoint folder, found nothing at"):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"cannot be read: .*File name too long"):
        Checkpoint.open("x" * 300)
    with pytest.raises(CheckpointError, match=r"config.json is a file"):
        Checkpoint.open(folder / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty has no config.json; expected a Hugging Face"):
        Checkpoint.open(tmp_path / "empty")
    shard_of(folder).unlink()
    (folder / _INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"has no .safetensors file"):
        Checkpoint.open(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CheckpointError, match=r"pickled weights \(pytorch_model.bin\).*save"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("source", ["nobody/no-such-model", "nobody/--bad--name", "a/b."])
def test_a_model_id_that_cannot_be_fetched_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"^{source} is no local folder, and could not be downloaded"
    ):
        Checkpoint.open(source)
