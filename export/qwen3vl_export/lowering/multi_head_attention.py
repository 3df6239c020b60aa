"""Vision attention -> `com.microsoft` MultiHeadAttention, heads side by side.

The canonical `Attention` holds all scores of all heads at once, patches squared; this operator
works through them in tiles that stay in the cache, and needs no transposes around it.
"""

from __future__ import annotations

import onnx_ir as ir

from qwen3vl_export.lowering.edit import (
    Editor,
    attribute,
    num_heads,
    only_reader,
    producer,
    rotated_flat,
)

__all__ = ["use_multi_head_attention"]


def use_multi_head_attention(model: ir.Model) -> bool:
    """Replace every attention that has no mask; returns whether there was one."""
    editor = Editor(model)
    attentions = [
        node for node in model.graph if node.op_type == "Attention" and len(node.inputs) == 3
    ]
    for attention in attentions:
        _replace(editor, attention)
    return bool(attentions)


def _replace(editor: Editor, attention: ir.Node) -> None:
    query_rotary, key_rotary = producer(attention.inputs[0]), producer(attention.inputs[1])
    value_transpose = producer(attention.inputs[2])
    merge_reshape = only_reader(only_reader(attention.outputs[0]).outputs[0])
    with editor.before(attention):
        query, key = rotated_flat(editor, query_rotary), rotated_flat(editor, key_rotary)
        value = producer(value_transpose.inputs[0]).inputs[0]  # before the split into heads
        (output,) = editor.node(
            "MultiHeadAttention",
            [query, key, value],
            domain="com.microsoft",
            num_heads=num_heads(attention.inputs[0]),
            scale=attribute(attention, "scale", 0.0),
        )
    editor.replace(merge_reshape.outputs[0], output)
