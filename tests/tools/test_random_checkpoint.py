"""Random checkpoints must be what they stand in for: real shapes, real files, loadable weights."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.shapes import PIXEL_LIMITS, RANDOM_SHAPES
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import COMPONENTS
from qwen3vl_export.modules import weight_sources
from qwen3vl_tools import random_checkpoint
from qwen3vl_tools.random_checkpoint import PRESETS, main, make_config, write_random_checkpoint


@pytest.mark.parametrize(
    ("preset", "parameters"),
    # Counts of the released checkpoints' safetensors files.
    [("2b", 2_127_532_032), ("4b", 4_437_815_808), ("8b", 8_767_123_696)],
)
def test_presets_have_the_parameters_of_the_released_models(preset: str, parameters: int) -> None:
    config = ModelConfig.from_dict(make_config(preset))
    shapes = {
        tensor.name: tensor.shape
        for component in COMPONENTS
        for source in weight_sources(component, config).values()
        for tensor in source.tensors
    }
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters


def test_making_a_config_changes_no_preset() -> None:
    before = copy.deepcopy((PRESETS, make_config("2b")))
    config = make_config("2b", text={"vocab_size": 5}, vision={"depth": 1}, dtype="float32")
    config["text_config"]["rope_parameters"]["rope_theta"] = 1.0
    config["vision_config"]["deepstack_visual_indexes"].append(99)
    assert config["text_config"]["vocab_size"] == 5
    assert config["dtype"] == "float32"
    assert (PRESETS, make_config("2b")) == before


@pytest.mark.parametrize("name", RANDOM_SHAPES)
def test_transformers_loads_every_weight(checkpoint: Callable[[str], Path], name: str) -> None:
    model, info = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint(name), output_loading_info=True, dtype=torch.bfloat16
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    stored: dict[str, torch.Tensor] = {}
    for shard in checkpoint(name).glob("*.safetensors"):
        stored |= load_file(shard)
    loaded = model.state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in stored.items())
    assert AutoTokenizer.from_pretrained(checkpoint(name)).encode("red") != []


def test_a_seed_decides_every_value(tmp_path: Path) -> None:
    config = RANDOM_SHAPES["one-layer"]
    for folder, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_random_checkpoint(tmp_path / folder, config, seed=seed)
    first, same, other = (load_file(tmp_path / f / "model-00000.safetensors") for f in "abc")
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_preprocessors_follow_the_config_and_the_limits(tmp_path: Path) -> None:
    write_random_checkpoint(
        tmp_path / "made", RANDOM_SHAPES["one-layer"], pixel_limits=PIXEL_LIMITS
    )
    for name, size in PIXEL_LIMITS.items():
        written = json.loads((tmp_path / "made" / name).read_text(encoding="utf-8"))
        assert written["size"] == size
        assert (written["patch_size"], written["merge_size"]) == (14, 1)


def test_shards_are_named_by_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_checkpoint, "_SHARD_BYTES", 150_000)
    folder = tmp_path / "made"
    write_random_checkpoint(folder, RANDOM_SHAPES["one-layer"])
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    shards = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert len(shards) > 2
    assert index["weight_map"] == {
        tensor: shard for shard, tensors in shards.items() for tensor in tensors
    }


def test_the_command_writes_a_checkpoint_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = RANDOM_SHAPES["tied"]
    monkeypatch.setitem(
        PRESETS,
        "2b",
        {
            "tie_word_embeddings": True,
            "text_config": small["text_config"],
            "vision_config": small["vision_config"],
        },
    )
    args = ["--preset", "2b", "--output", str(tmp_path / "made"), "--layers", "2"]
    assert main([*args, "--vision-layers", "4"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'made'}\n"
    written = json.loads((tmp_path / "made" / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig.from_dict(written)
    assert config.text.num_hidden_layers == 2
    assert config.vision.depth == 4
    assert config.vision.deepstack_visual_indexes == (0, 1)
    assert main(args) == 1
    assert capsys.readouterr().err.startswith("error: ")
