"""Integer weights: the arithmetic, and that ONNX Runtime computes what it stands for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_ir.passes.common import RemoveUnusedNodesPass

from qwen3vl_export.lowering import quantize_linears, quantized_names
from qwen3vl_export.quantization import (
    BlockScheme,
    ChannelScheme,
    Scheme,
    dequantize_blocks,
    quantize_blocks,
    quantize_channels,
)

SCHEMES = [BlockScheme(8, 128), BlockScheme(8, 32), BlockScheme(4, 128), BlockScheme(4, 32)]
#: Hidden widths of real and test models, most of them no multiple of a block.
WIDTHS = [16, 72, 96, 208, 304, 1152, 4304]


def _weight(seed: int, out_features: int, in_features: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out_features, in_features, generator=generator)


@settings(deadline=None, max_examples=60)
@given(
    scheme=st.sampled_from(SCHEMES),
    out_features=st.integers(1, 9),
    in_features=st.integers(1, 300),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_blocks_are_off_by_half_a_step(
    scheme: BlockScheme, out_features: int, in_features: int, scale: float, seed: int
) -> None:
    weight = _weight(seed, out_features, in_features) * scale
    integers, scales = quantize_blocks(weight, scheme)
    blocks = scheme.num_blocks(in_features)
    assert integers.shape == (out_features, blocks, scheme.block_bytes)
    assert integers.dtype == torch.uint8
    restored = dequantize_blocks(integers, scales, scheme)[:, :in_features]
    steps = scales.abs().repeat_interleave(scheme.block_size, dim=1)[:, :in_features]
    # The far end of the range, opposite to the largest value, is one step short.
    error = (restored - weight).abs()
    assert (error <= steps * 1.001).all()
    assert (error <= steps * 0.501)[weight.abs() < steps * ((1 << (scheme.bits - 1)) - 1)].all()


def test_largest_value_of_a_block_is_exact() -> None:
    weight = torch.zeros(2, 32)
    weight[0, 5], weight[1, 7] = 3.5, -1.25
    integers, scales = quantize_blocks(weight, BlockScheme(4, 32))
    restored = dequantize_blocks(integers, scales, BlockScheme(4, 32))
    torch.testing.assert_close(restored, weight)


@settings(deadline=None, max_examples=40)
@given(out_features=st.integers(1, 9), in_features=st.integers(1, 300), seed=st.integers(0, 1000))
def test_channels_are_off_by_half_a_step(out_features: int, in_features: int, seed: int) -> None:
    weight = _weight(seed, out_features, in_features)
    integers, scales = quantize_channels(weight)
    error = (integers.float() * scales[:, None] - weight).abs()
    assert (error <= scales[:, None] * 0.501).all()


@pytest.mark.parametrize("scheme", [*SCHEMES, ChannelScheme()], ids=str)
def test_zero_weights_stay_zero(scheme: Scheme) -> None:
    weight = torch.zeros(3, 64)
    if isinstance(scheme, ChannelScheme):
        integers, scales = quantize_channels(weight)
        assert not integers.any()
    else:
        integers, scales = quantize_blocks(weight, scheme)
        assert not dequantize_blocks(integers, scales, scheme).any()
    assert not scales.any()


@pytest.mark.parametrize("in_features", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_block_product_on_onnx_runtime(scheme: BlockScheme, in_features: int, rows: int) -> None:
    """Equal to the product with the restored weight, up to the rounding of the activations."""
    weight = _weight(0, 24, in_features)
    integers, scales = quantize_blocks(weight, scheme)
    restored = dequantize_blocks(integers, scales, scheme)[:, :in_features]
    x, bias = _weight(1, rows, in_features), _weight(2, 1, 24)[0]
    actual = _run(weight, bias, x, scheme, integers, scales.flatten())
    expected = (x @ restored.T + bias).numpy()
    # int8 activations: half of 1/127 of each block's largest value, averaged over the inputs.
    error = np.sqrt(np.mean((actual - expected) ** 2)) / expected.std()
    assert error < 0.012
    naive = (x @ weight.T + bias).numpy()
    if scheme.bits == 4:
        assert np.sqrt(np.mean((actual - naive) ** 2)) / naive.std() > 2 * error


@pytest.mark.parametrize("in_features", WIDTHS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_channel_product_on_onnx_runtime(in_features: int, rows: int) -> None:
    """Equal to a numpy reference of the same quantisation of weights and activations."""
    weight = _weight(0, 24, in_features)
    integers, scales = quantize_channels(weight)
    x, bias = _weight(1, rows, in_features), _weight(2, 1, 24)[0]
    actual = _run(weight, bias, x, ChannelScheme(), integers.T.contiguous(), scales)
    expected = _dynamic_product(x.numpy(), integers.numpy(), scales.numpy()) + bias.numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def _dynamic_product(x: np.ndarray, integers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """ONNX DynamicQuantizeLinear of the whole input, then an integer product."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = np.float32((high - low) / 255)
    zero_point = np.clip(np.rint(-low / scale), 0, 255)
    quantized = np.clip(np.rint(x / scale) + zero_point, 0, 255) - zero_point
    product = quantized.astype(np.int64) @ integers.T.astype(np.int64)
    return product.astype(np.float32) * scale * scales


def _run(
    weight: torch.Tensor,
    bias: torch.Tensor,
    x: torch.Tensor,
    scheme: Scheme,
    integers: torch.Tensor,
    scales: torch.Tensor,
) -> np.ndarray:
    """Lower `x @ weight + bias` by the pass, fill the weights in, and run it."""
    out_features, in_features = weight.shape
    data_type = ir.TensorType(ir.DataType.FLOAT)
    x_value = ir.Value(name="x", shape=ir.Shape(["rows", in_features]), type=data_type)
    weight_value = ir.Value(name="w", shape=ir.Shape([in_features, out_features]), type=data_type)
    bias_value = ir.Value(
        name="b",
        shape=ir.Shape([out_features]),
        type=data_type,
        const_value=ir.tensor(bias.numpy(), name="b"),
    )
    product = ir.node("MatMul", [x_value, weight_value], name="layer/MatMul")
    product.outputs[0].type, product.outputs[0].name = data_type, "product"
    add = ir.node("Add", [product.outputs[0], bias_value], name="layer/Add")
    output = add.outputs[0]
    output.name, output.type = "y", data_type
    output.shape = ir.Shape(["rows", out_features])
    graph = ir.Graph(
        [x_value],
        [output],
        nodes=[product, add],
        initializers=[bias_value],
        opset_imports={"": 24},
        name="g",
    )
    graph.initializers["w"] = weight_value
    model = ir.Model(graph, ir_version=10)
    assert quantize_linears(model, lambda name: scheme) == {"w": scheme}
    RemoveUnusedNodesPass()(model)
    for name, tensor in zip(quantized_names("w"), (integers, scales), strict=True):
        graph.initializers[name].const_value = ir.tensor(tensor.numpy(), name=name)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    (result,) = session.run(["y"], {"x": x.numpy()})
    return np.asarray(result)
