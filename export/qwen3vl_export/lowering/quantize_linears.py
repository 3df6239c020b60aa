"""MatMul with a weight -> ONNX Runtime's products with integer weights.

`BlockScheme` gives MatMulNBits, which quantises each token's activations by itself: a token's
result does not depend on what else is in the call, and one token is fast. `ChannelScheme` gives
DynamicQuantizeMatMul, which quantises the activations of a whole call with one scale, and is three
times as fast on many tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from qwen3vl_export.lowering.edit import Editor
from qwen3vl_export.quantization import BlockScheme, Scheme

__all__ = ["quantize_linears", "quantized_names"]

#: MatMulNBits computes in int8 x int8 at this level.
_INT8_ACTIVATIONS = 4


def quantize_linears(model: ir.Model, choose: Callable[[str], Scheme | None]) -> dict[str, Scheme]:
    """Replace linears.

    Args:
        model: Edited in place; weights have no data yet.
        choose: The scheme of a weight, by its name; None leaves it in float.

    Returns:
        The weights that were replaced and their schemes; their integers and scales are
        initializers under `quantized_names`.
    """
    editor = Editor(model)
    quantized: dict[str, Scheme] = {}
    for node in [node for node in model.graph if node.op_type == "MatMul" and _has_weight(node)]:
        name = _weight(node).name or ""
        scheme = choose(name)
        if scheme is not None:
            quantized[name] = scheme
            _replace(editor, node, scheme)
    return quantized


def quantized_names(weight: str) -> tuple[str, str]:
    """Names of the initializers that hold a weight's integers and scales."""
    return f"{weight}.quantized", f"{weight}.scales"


def _weight(node: ir.Node) -> ir.Value:
    weight = node.inputs[1]
    assert weight is not None
    return weight


def _has_weight(node: ir.Node) -> bool:
    weight = _weight(node)
    return weight.is_initializer() and weight.const_value is None


def _replace(editor: Editor, node: ir.Node, scheme: Scheme) -> None:
    add, bias = _bias(node)
    replaced = node if add is None else add
    make = _blocks_product if isinstance(scheme, BlockScheme) else _channels_product
    with editor.before(replaced):
        editor.replace(replaced.outputs[0], make(editor, node, scheme, bias))


def _blocks_product(
    editor: Editor, node: ir.Node, scheme: Scheme, bias: ir.Value | None
) -> ir.Value:
    assert isinstance(scheme, BlockScheme)
    weight = _weight(node)
    in_features, out_features = _shape(weight)
    blocks = scheme.num_blocks(in_features)
    integers_name, scales_name = quantized_names(weight.name or "")
    integers = editor.weight(
        integers_name, (out_features, blocks, scheme.block_bytes), ir.DataType.UINT8
    )
    scales = editor.weight(scales_name, (out_features * blocks,), ir.DataType.FLOAT)
    (output,) = editor.node(
        "MatMulNBits",
        [node.inputs[0], integers, scales, None, None, bias],
        domain="com.microsoft",
        K=in_features,
        N=out_features,
        bits=scheme.bits,
        block_size=scheme.block_size,
        accuracy_level=_INT8_ACTIVATIONS,
    )
    return output


def _channels_product(
    editor: Editor, node: ir.Node, scheme: Scheme, bias: ir.Value | None
) -> ir.Value:
    weight = _weight(node)
    in_features, out_features = _shape(weight)
    integers_name, scales_name = quantized_names(weight.name or "")
    integers = editor.weight(integers_name, (in_features, out_features), ir.DataType.INT8)
    scales = editor.weight(scales_name, (out_features,), ir.DataType.FLOAT)
    (output,) = editor.node(
        "DynamicQuantizeMatMul",
        [node.inputs[0], integers, scales, None, bias],
        domain="com.microsoft",
    )
    return output


def _shape(weight: ir.Value) -> tuple[int, int]:
    assert weight.shape is not None
    in_features, out_features = weight.shape.numpy()
    return in_features, out_features


def _bias(node: ir.Node) -> tuple[ir.Node | None, ir.Value | None]:
    """The add of a bias that follows a linear, and the bias."""
    uses = list(node.outputs[0].uses())
    if len(uses) == 1 and uses[0].node.op_type == "Add":
        add = uses[0].node
        other = add.inputs[1 - uses[0].idx]
        if other is not None and other.is_initializer():
            return add, other
    return None, None
