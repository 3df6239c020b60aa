"""Every weight in a data file against the checkpoint's, bit by bit, and the refusal of bad ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.shapes import PIXEL_LIMITS, RANDOM_SHAPES
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from qwen3vl_export import weights as weights_module
from qwen3vl_export.checkpoint import Checkpoint
from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import COMPONENTS, PRECISIONS
from qwen3vl_export.errors import ExportError
from qwen3vl_export.graph import ComponentGraph, trace_component
from qwen3vl_export.modules import weight_sources
from qwen3vl_export.text_decoder import mrope_constants
from qwen3vl_export.weights import weight_bytes, write_weights
from qwen3vl_tools.random_checkpoint import write_random_checkpoint

_ALIGNMENT = 4096
#: Names are ONNX's; torch reads each with the type beside it.
_TORCH_TYPES = {"FLOAT": torch.float32, "FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16}


def stored_tensors(folder: Path, component: str) -> dict[str, tuple[int, torch.Tensor]]:
    """Offset and value of each external initializer, read with nothing but `onnx` and bytes."""
    model = onnx.load(folder / f"{component}.onnx", load_external_data=False)
    data = (folder / f"{component}.onnx.data").read_bytes()
    tensors = {}
    for tensor in model.graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if not entries:
            continue
        offset, length = int(entries["offset"]), int(entries["length"])
        dtype = _TORCH_TYPES.get(onnx.TensorProto.DataType.Name(tensor.data_type), torch.int64)
        raw = torch.frombuffer(bytearray(data[offset : offset + length]), dtype=dtype)
        tensors[tensor.name] = offset, raw.reshape(list(tensor.dims))
    return tensors


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
    return tensors


def expected_of(
    name: str, component: str, source: dict[str, torch.Tensor], tied: bool
) -> tuple[str, torch.Tensor]:
    """The checkpoint tensor of an initializer, by rules written down a second time here."""
    if name == "lm_head.weight":
        key = "model.language_model.embed_tokens.weight" if tied else "lm_head.weight"
    else:
        key = ("model.visual." if component == "vision" else "model.language_model.") + name
    tensor = source[key]
    is_table = name in ("pos_embed.weight", "embed_tokens.weight")
    if tensor.ndim > 1 and not is_table:
        tensor = tensor.reshape(len(tensor), -1).T
    return key, tensor


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "fp32") for name in ("trained", *RANDOM_SHAPES)),
        *((name, "fp16") for name in ("trained", "untied-head72", "four-levels")),
    ],
)
def test_every_weight_equals_the_checkpoints(
    bundle: Callable[..., Path], checkpoint: Callable[[str], Path], name: str, precision: str
) -> None:
    folder = checkpoint(name)
    source = checkpoint_tensors(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    used = set()
    for component in COMPONENTS:
        for weight, (_, value) in stored_tensors(bundle(name, precision), component).items():
            if weight.startswith("rope."):
                continue
            key, expected = expected_of(weight, component, source, config["tie_word_embeddings"])
            used.add(key)
            assert value.dtype == getattr(torch, PRECISIONS[precision])
            assert torch.equal(value, expected.to(value.dtype)), weight
    # What transformers stores and the graphs leave out would be a silently dropped feature.
    assert used == source.keys()


def test_bf16_weights_are_the_checkpoints_own_bits(
    bundle: Callable[..., Path], checkpoint: Callable[[str], Path]
) -> None:
    source = checkpoint_tensors(checkpoint("one-layer"))
    for component in COMPONENTS:
        for weight, (_, value) in stored_tensors(bundle("one-layer", "bf16"), component).items():
            if not weight.startswith("rope."):
                _, expected = expected_of(weight, component, source, tied=True)
                assert torch.equal(value, expected), weight


@pytest.mark.parametrize("name", RANDOM_SHAPES)
def test_rotary_constants_equal_transformers(bundle: Callable[..., Path], name: str) -> None:
    rotary = Qwen3VLTextRotaryEmbedding(Qwen3VLConfig(**RANDOM_SHAPES[name]).text_config)
    stored = stored_tensors(bundle(name), "decoder")
    assert torch.equal(stored["rope.inv_freq"][1], rotary.inv_freq)
    # Give each axis its own number: what comes out tells which axis each frequency reads.
    half = len(rotary.inv_freq)
    marked = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, half).clone()
    assert torch.equal(
        stored["rope.axis"][1].float(), rotary.recomposition_frequencies(marked)[0, 0, :half]
    )


@pytest.mark.parametrize("section", [[24, 20, 20], [10, 7, 7], [4, 9, 3], [0, 1, 7], [9, 0, 0]])
def test_every_frequency_turns_by_the_axis_of_transformers(section: list[int]) -> None:
    half = sum(section)
    changed = copy.deepcopy(RANDOM_SHAPES["tied"])
    changed["text_config"]["head_dim"] = 2 * half
    changed["text_config"]["rope_parameters"]["mrope_section"] = section
    rotary = Qwen3VLTextRotaryEmbedding(Qwen3VLConfig(**copy.deepcopy(changed)).text_config)
    constants = mrope_constants(ModelConfig.from_dict(changed).text)
    marked = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, half).clone()
    assert torch.equal(
        constants["rope.axis"].float(), rotary.recomposition_frequencies(marked)[0, 0, :half]
    )
    assert torch.equal(constants["rope.inv_freq"], rotary.inv_freq)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tensors_are_aligned_disjoint_and_fill_the_file(
    bundle: Callable[..., Path], precision: str
) -> None:
    folder = bundle("one-layer", precision)
    for component in COMPONENTS:
        end = 0
        for offset, value in sorted(
            stored_tensors(folder, component).values(), key=lambda pair: pair[0]
        ):
            assert offset % _ALIGNMENT == 0
            assert 0 <= offset - end < _ALIGNMENT
            end = offset + value.nbytes
        assert (folder / f"{component}.onnx.data").stat().st_size == end


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_announced_size_is_the_sum_of_the_weights(
    bundle: Callable[..., Path], precision: str
) -> None:
    config = ModelConfig.from_dict(RANDOM_SHAPES["one-layer"])
    for component in COMPONENTS:
        stored = stored_tensors(bundle("one-layer", precision), component)
        total = sum(value.nbytes for name, (_, value) in stored.items() if "rope." not in name)
        announced = weight_bytes(weight_sources(component, config), precision, lambda name: None)
        assert announced == total


# One decoder layer and one vision layer trace in a second or two; the embedding in much less.
_CONFIG = ModelConfig.from_dict(RANDOM_SHAPES["one-layer"])


@pytest.fixture
def own_checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    write_random_checkpoint(folder, RANDOM_SHAPES["one-layer"], seed=2, pixel_limits=PIXEL_LIMITS)
    return folder


@lru_cache
def embedding_graph(precision: str) -> ComponentGraph:
    """Traced once: writing weights refers to them anew each time."""
    return trace_component("embedding", _CONFIG, precision)


def write_embedding(folder: Path, precision: str, out: Path) -> list[int]:
    progress: list[int] = []
    out.mkdir(exist_ok=True)
    write_weights(
        embedding_graph(precision),
        weight_sources("embedding", _CONFIG),
        Checkpoint.open(folder),
        precision,
        out / "embedding.onnx.data",
        progress.append,
    )
    return progress


def change_tensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    (shard,) = folder.glob("*.safetensors")
    tensors = load_file(shard)
    tensors[name] = change(tensors[name])
    save_file(tensors, shard)


_EMBEDDING = "model.language_model.embed_tokens.weight"


def with_value(value: float, index: int = 1234) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.float()
        tensor.view(-1)[index] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("value", "precision", "message"),
    [
        (70000.0, "fp16", r"reaches 70000, beyond .*float16 value 65504; .*--precision bf16 or"),
        (-1e38, "fp16", r"reaches 1e\+38, beyond the largest"),
        (65520.0, "fp16", r"reaches 65520"),  # the first value that rounds to infinity
        (float("nan"), "fp16", "holds NaN or infinite values; the checkpoint is damaged"),
        (float("nan"), "fp32", "holds NaN or infinite values"),
        (float("inf"), "fp32", "holds NaN or infinite values"),
        (float("-inf"), "bf16", "holds NaN or infinite values"),
        (3.4e38, "bf16", r"reaches 3.4e\+38, beyond the largest torch.bfloat16 value"),
    ],
)
@pytest.mark.parametrize("index", [0, -1])
def test_weights_that_the_precision_cannot_hold_are_named(
    own_checkpoint: Path, tmp_path: Path, value: float, precision: str, message: str, index: int
) -> None:
    change_tensor(own_checkpoint, _EMBEDDING, with_value(value, index))
    with pytest.raises(ExportError, match=rf"^{_EMBEDDING} {message}"):
        write_embedding(own_checkpoint, precision, tmp_path / "out")


@pytest.mark.parametrize("value", [65504.0, -65504.0, 65519.0])
def test_the_largest_fp16_values_are_kept(
    own_checkpoint: Path, tmp_path: Path, value: float
) -> None:
    change_tensor(own_checkpoint, _EMBEDDING, with_value(value))
    write_embedding(own_checkpoint, "fp16", tmp_path / "out")
    written = np.fromfile(tmp_path / "out" / "embedding.onnx.data", np.float16)
    assert written[1234] == np.sign(value) * 65504


@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_blocks_of_any_size_write_the_same_file(
    own_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    block_bytes: int,
    precision: str,
) -> None:
    whole = write_embedding(own_checkpoint, precision, tmp_path / "whole")
    monkeypatch.setattr(weights_module, "_BLOCK_BYTES", block_bytes)
    blocks = write_embedding(own_checkpoint, precision, tmp_path / "blocks")
    assert len(whole) == 1
    assert sum(blocks) == sum(whole)
    assert (len(blocks) == 1) == (block_bytes == 1 << 20)
    name = "embedding.onnx.data"
    assert (tmp_path / "blocks" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_transposed_weights_are_the_same_in_blocks_of_any_size(
    own_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "_BLOCK_BYTES", 5000)
    graph = trace_component("vision", _CONFIG, "fp16")
    file = write_weights(
        graph,
        weight_sources("vision", _CONFIG),
        Checkpoint.open(own_checkpoint),
        "fp16",
        tmp_path / "vision.onnx.data",
        lambda count: None,
    )
    source = checkpoint_tensors(own_checkpoint)
    data = (tmp_path / "vision.onnx.data").read_bytes()
    assert file.size == len(data)
    for name in graph.weights:
        value = graph.model.graph.initializers[name].const_value
        _, expected = expected_of(name, "vision", source, tied=True)
        stored = np.frombuffer(data, np.float16, expected.numel(), value.offset)
        assert np.array_equal(stored, expected.half().numpy().reshape(-1)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_checkpoints_of_every_float_type_are_read(
    own_checkpoint: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    change_tensor(own_checkpoint, _EMBEDDING, lambda tensor: tensor.to(dtype))
    expected = checkpoint_tensors(own_checkpoint)[_EMBEDDING]
    assert expected.dtype == dtype
    write_embedding(own_checkpoint, "fp32", tmp_path / "out")
    written = np.fromfile(tmp_path / "out" / "embedding.onnx.data", np.float32)
    assert np.array_equal(written, expected.float().numpy().reshape(-1))
