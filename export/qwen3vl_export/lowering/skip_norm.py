"""Residual add + RMSNorm -> `com.microsoft` SkipSimplifiedLayerNormalization.

One pass over the hidden states instead of two, in a kernel that ONNX Runtime has tuned; the sum,
which the next residual needs, is its last output.
"""

from __future__ import annotations

import onnx_ir as ir

from qwen3vl_export.lowering.edit import Editor, attribute

__all__ = ["use_skip_norm"]


def use_skip_norm(model: ir.Model) -> bool:
    """Fuse every RMSNorm with the add before it; returns whether there was one."""
    editor = Editor(model)
    norms = [node for node in model.graph if node.op_type == "RMSNormalization"]
    changed = False
    for norm in norms:
        total = norm.inputs[0]
        add = None if total is None else total.producer()
        if add is None or add.op_type != "Add" or not _same_shape(add):
            continue
        with editor.before(add):
            normed, _, _, summed = editor.node(
                "SkipSimplifiedLayerNormalization",
                [*add.inputs, norm.inputs[1]],
                num_outputs=4,
                domain="com.microsoft",
                epsilon=attribute(norm, "epsilon", 1e-5),
            )
        editor.replace(norm.outputs[0], normed)
        editor.replace(add.outputs[0], summed)
        changed = True
    return changed


def _same_shape(add: ir.Node) -> bool:
    """Whether the add is of two hidden states, with nothing to broadcast."""
    left, right = add.inputs
    assert left is not None
    assert right is not None
    return left.shape is not None and left.shape == right.shape
