"""Graph passes that turn canonical graphs into what ONNX Runtime runs fastest.

Names and shapes of inputs and outputs stay those of the contract, so the runtime runs either. Each
pass edits a model in place and returns whether it changed anything; none needs the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from qwen3vl_export.lowering.group_query_attention import use_group_query_attention
from qwen3vl_export.lowering.multi_head_attention import use_multi_head_attention
from qwen3vl_export.lowering.quantize_linears import quantize_linears, quantized_names
from qwen3vl_export.lowering.skip_norm import use_skip_norm
from qwen3vl_export.quantization import Scheme

__all__ = [
    "lower_for_ort",
    "quantize_linears",
    "quantized_names",
    "use_group_query_attention",
    "use_multi_head_attention",
    "use_skip_norm",
]


def lower_for_ort(model: ir.Model, choose: Callable[[str], Scheme | None]) -> dict[str, Scheme]:
    """Run every pass, and remove what they left unused.

    Args:
        model: Edited in place.
        choose: How a linear's weight is quantised, by its name; None leaves it in float.

    Returns:
        The weights that are stored quantised, and how.
    """
    use_group_query_attention(model)
    use_multi_head_attention(model)
    use_skip_norm(model)
    quantized = quantize_linears(model, choose)
    RemoveUnusedNodesPass()(model)
    return quantized
