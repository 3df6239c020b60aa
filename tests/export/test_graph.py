"""What tracing must not do: bake sizes in, drop outputs, spend memory on weights, or make noise."""

from __future__ import annotations

import dataclasses
import logging
import warnings

import numpy as np
import onnx_ir as ir
import pytest
import torch
from tests.shapes import RANDOM_SHAPES

from qwen3vl_export import graph as graph_module
from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import ComponentContract, TensorSpec, component_contract
from qwen3vl_export.errors import ContractError
from qwen3vl_export.graph import ComponentGraph, trace_component
from qwen3vl_export.modules import weight_sources

_CONFIG = ModelConfig.from_dict(RANDOM_SHAPES["one-layer"])


@pytest.fixture(scope="module")
def decoder() -> ComponentGraph:
    return trace_component("decoder", _CONFIG, "fp16")


def test_every_weight_is_an_initializer_without_data(decoder: ComponentGraph) -> None:
    sources = weight_sources("decoder", _CONFIG)
    assert set(decoder.weights) == sources.keys() | decoder.constants.keys()
    for name in decoder.weights:
        value = decoder.model.graph.initializers[name]
        assert value.const_value is None
        shape = [int(dim) for dim in value.shape or ()]
        if name in decoder.constants:
            assert shape == list(decoder.constants[name].shape)
        else:
            (stored,) = sources[name].tensors
            assert shape == list(stored.shape[::-1] if sources[name].transposed else stored.shape)


def test_packed_projections_are_joined_in_the_checkpoint_s_order() -> None:
    sources = weight_sources("decoder", _CONFIG, packed=True)
    plain = weight_sources("decoder", _CONFIG)
    packed = trace_component("decoder", _CONFIG, "fp32", packed=True)
    assert set(packed.weights) == sources.keys() | packed.constants.keys()
    attention = "layers.0.self_attn."
    names = [f"{attention}{part}_proj.weight" for part in "qkv"]
    joined = sources[f"{attention}qkv_proj.weight"]
    assert joined.tensors == tuple(plain[name].tensors[0] for name in names)
    assert sum(source.num_values for source in sources.values()) == sum(
        source.num_values for source in plain.values()
    )


def test_no_traced_size_is_left_in_the_graph(decoder: ComponentGraph) -> None:
    """A size in a Reshape is how an export works for the traced length only."""
    traced = set(graph_module._TRACE_SIZES.values()) - {3}
    batch_seq = {2 * 5, 2 * 11, 5 * 11}
    for node in decoder.model.graph:
        if node.op_type not in ("Reshape", "Expand"):
            continue
        shape = ir.convenience.get_const_tensor(node.inputs[1])
        if shape is None:
            continue
        sizes = set(np.asarray(shape.numpy()).reshape(-1).tolist())
        # 4 query and key heads and a head_dim of 32 are the only fixed sizes of these.
        assert not sizes & (traced - {4} | batch_seq), (node.name, sizes)


def test_the_graph_has_no_transpose_of_a_weight(decoder: ComponentGraph) -> None:
    for node in decoder.model.graph:
        if node.op_type == "Transpose":
            assert not node.inputs[0].is_initializer(), node.name


def test_caches_are_written_in_place_and_attention_reads_the_result(
    decoder: ComponentGraph,
) -> None:
    nodes = list(decoder.model.graph)
    scatters = [node for node in nodes if node.op_type == "TensorScatter"]
    attention = [node for node in nodes if node.op_type == "Attention"]
    assert len(attention) == 1
    assert [node.inputs[0].name for node in scatters] == [
        "past_key_values.0.key",
        "past_key_values.0.value",
    ]
    assert [node.outputs[0].name for node in scatters] == ["present.0.key", "present.0.value"]
    assert all(node.inputs[2].name == "write_indices" for node in scatters)


def test_tracing_a_large_model_takes_no_memory_for_its_weights() -> None:
    """An embedding of a terabyte traces like a small one."""
    text = dataclasses.replace(_CONFIG.text, vocab_size=1 << 28)
    config = dataclasses.replace(_CONFIG, text=text)
    graph = trace_component("embedding", config, "fp32")
    assert graph.model.graph.initializers["embed_tokens.weight"].shape == ir.Shape((1 << 28, 96))


def test_tracing_is_deterministic() -> None:
    first, second = (
        ir.to_proto(trace_component("embedding", _CONFIG, "fp32").model).SerializeToString(
            deterministic=True
        )
        for _ in range(2)
    )
    assert first == second


def test_tracing_is_quiet_and_leaves_the_process_as_it_was(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    dtype, level = torch.get_default_dtype(), logging.getLogger("torch.onnx").level
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace_component("embedding", _CONFIG, "bf16")
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert torch.get_default_dtype() == dtype
    assert logging.getLogger("torch.onnx").level == level


def _altered(contract: ComponentContract, **changes: tuple[TensorSpec, ...]) -> ComponentContract:
    return dataclasses.replace(contract, **changes)


@pytest.mark.parametrize("fault", ["output-lost", "other-size"])
def test_a_graph_that_differs_from_the_contract_is_refused(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A module that lost its DeepStack output must not be exported in silence."""
    contract = component_contract("embedding", _CONFIG)
    first, *others = contract.outputs
    outputs = {
        "output-lost": (first, *others, TensorSpec("lost", ("batch",), "F")),
        "other-size": (dataclasses.replace(first, shape=("batch", "seq", 95)), *others),
    }[fault]
    monkeypatch.setattr(
        graph_module, "component_contract", lambda *_: _altered(contract, outputs=outputs)
    )
    message = (
        "has 2 tensors where the contract has 3" if fault == "output-lost" else "traced tensor"
    )
    with pytest.raises(ContractError, match=message):
        trace_component("embedding", _CONFIG, "fp32")
