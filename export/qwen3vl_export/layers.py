"""Layers shared by the two transformers, in the form that ONNX Runtime and TensorRT both take.

Modules here exist to be traced on the meta device: they hold shapes, never weights. Parameter
names follow the checkpoint's, so a traced initializer's name finds its tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Linear", "RMSNorm", "rotary_embedding"]


class Linear(nn.Module):
    """`x @ weight + bias` with the weight stored [in_features, out_features].

    One MatMul over the last axis, where torch's own Linear would leave a Transpose in the graph;
    the exporter transposes the checkpoint's [out, in] weight while streaming it.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        """Create the (meta) parameters."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        out = torch.matmul(x, self.weight)
        return out if self.bias is None else out + self.bias


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, computed in fp32 inside the operator."""

    def __init__(self, size: int, eps: float) -> None:
        """Create the (meta) scale."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., size]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of each head.

    Args:
        x: [batch, heads, seq, head_dim].
        cos: [batch, seq, head_dim / 2], in x's dtype; TensorRT refuses full-width tables.
        sin: Likewise.

    Returns:
        [batch, heads, seq, head_dim].
    """
    return torch.onnx.ops.rotary_embedding(x, cos, sin)
