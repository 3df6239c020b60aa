"""Decoder attention -> `com.microsoft` GroupQueryAttention over the same, shared KV cache.

The canonical `Attention` costs by the cache's capacity; this operator costs by what is filled, and
reads nothing else, so a NaN in an unused slot does no harm either. It appends to the cache itself,
takes heads side by side, so that no transposes are left, and masks by each row's length, so that
the mask goes too. `query_seqlens` is what makes it take batches of unequal lengths and chunked
prefill; every query of a call counts as valid, as in the canonical graph.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from qwen3vl_export.lowering.edit import (
    Editor,
    attribute,
    num_heads,
    only_reader,
    producer,
    rotated_flat,
)

__all__ = ["use_group_query_attention"]

_CAPACITY_AXIS = 2


def use_group_query_attention(model: ir.Model) -> bool:
    """Replace every cached attention; returns whether there was one."""
    attentions = [
        node
        for node in model.graph
        if node.op_type == "Attention" and producer(node.inputs[1]).op_type == "TensorScatter"
    ]
    if not attentions:
        return False
    editor = Editor(model)
    lengths = _Lengths(editor, attentions[0])
    for attention in attentions:
        _replace(editor, attention, lengths)
    return True


class _Lengths:
    """The length inputs that all layers share, computed before the first of them."""

    def __init__(self, editor: Editor, attention: ir.Node) -> None:
        scatter = producer(attention.inputs[1])
        past_key, update, write_indices = scatter.inputs
        assert past_key is not None
        assert update is not None
        assert write_indices is not None
        with editor.before(next(iter(editor.graph))):
            seq = editor.op("Shape", editor.graph.inputs[0], start=1, end=2)  # [1]
            last = editor.op("Sub", seq, editor.constant(np.array([1])))
            self.seqlens_k = editor.cast(editor.op("Add", write_indices, last), ir.DataType.INT32)
            counts = editor.op("Expand", seq, editor.op("Shape", write_indices))  # [batch]
            self.query_seqlens = editor.cast(counts, ir.DataType.INT32)
            capacity = editor.op("Shape", past_key, start=_CAPACITY_AXIS, end=_CAPACITY_AXIS + 1)
            scalar = editor.op("Squeeze", capacity)
            self.capacity = editor.cast(scalar, ir.DataType.INT32)


def _replace(editor: Editor, attention: ir.Node, lengths: _Lengths) -> None:
    """Rewrite one layer: [batch, heads, seq, dim] with transposes -> [batch, seq, heads * dim]."""
    key_scatter, value_scatter = producer(attention.inputs[1]), producer(attention.inputs[2])
    query_rotary, key_rotary = producer(attention.inputs[0]), producer(key_scatter.inputs[1])
    value_transpose = producer(value_scatter.inputs[1])
    merge_transpose = only_reader(attention.outputs[0])
    merge_reshape = only_reader(merge_transpose.outputs[0])
    with editor.before(attention):
        query, key = rotated_flat(editor, query_rotary), rotated_flat(editor, key_rotary)
        value = producer(value_transpose.inputs[0]).inputs[0]  # before the split into heads
        inputs = [query, key, value, key_scatter.inputs[0], value_scatter.inputs[0]]
        inputs += [lengths.seqlens_k, lengths.capacity, *[None] * 9, lengths.query_seqlens]
        output, present_key, present_value = editor.node(
            "GroupQueryAttention",
            inputs,
            num_outputs=3,
            domain="com.microsoft",
            num_heads=num_heads(query_rotary.inputs[0]),
            kv_num_heads=num_heads(key_rotary.inputs[0]),
            scale=attribute(attention, "scale", 0.0),
        )
    editor.replace(merge_reshape.outputs[0], output)
    editor.replace(key_scatter.outputs[0], present_key)
    editor.replace(value_scatter.outputs[0], present_value)
