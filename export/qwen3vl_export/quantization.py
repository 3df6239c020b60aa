"""Integer weights: the arithmetic, in the layouts of ONNX Runtime's quantised products.

`BlockScheme` is that of `com.microsoft` MatMulNBits: one scale a block of consecutive inputs of one
output channel, set by the block's value of largest magnitude, with its sign, so that it falls on
the end of the integer range that has one more step (-8 of -8..7). `ChannelScheme` is that of
DynamicQuantizeMatMul: int8, one scale an output channel. Both are symmetric.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "BlockScheme",
    "ChannelScheme",
    "Scheme",
    "dequantize_blocks",
    "quantize_blocks",
    "quantize_channels",
]


@dataclass(frozen=True)
class BlockScheme:
    """How a weight is quantised.

    Attributes:
        bits: 4 or 8.
        block_size: Inputs that share a scale; a power of two, at least 16.
    """

    bits: int
    block_size: int

    def num_blocks(self, in_features: int) -> int:
        """Blocks of one output channel; the last one may be padded with zeros."""
        return -(-in_features // self.block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's integers."""
        return self.block_size * self.bits // 8


@dataclass(frozen=True)
class ChannelScheme:
    """int8 with one scale an output channel."""

    bits: int = 8


Scheme = BlockScheme | ChannelScheme


def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows of a linear's weight.

    Args:
        weight: [out, in], any float type.

    Returns:
        int8 [out, in] within -127..127, and scales float32 [out].
    """
    values = weight.float()
    low, high = torch.aminmax(values, dim=1)  # [out]
    scales = torch.maximum(-low, high) / 127
    inverse = torch.where(scales == 0, torch.zeros_like(scales), 1.0 / scales)
    return (values * inverse.unsqueeze(1)).round_().to(torch.int8), scales


def quantize_blocks(weight: Tensor, scheme: BlockScheme) -> tuple[Tensor, Tensor]:
    """Quantise rows of a linear's weight.

    Args:
        weight: [out, in], any float type.
        scheme: Bits and block size.

    Returns:
        Integers plus 2^(bits - 1), uint8 [out, blocks, block_bytes], two to a byte for 4 bits, the
        first in the low half; scales float32 [out, blocks].
    """
    out_features, in_features = weight.shape
    half = 1 << (scheme.bits - 1)
    padding = scheme.num_blocks(in_features) * scheme.block_size - in_features
    blocks = F.pad(weight.float(), (0, padding)).reshape(out_features, -1, scheme.block_size)
    low, high = torch.aminmax(blocks, dim=-1)  # [out, blocks]
    extreme = torch.where(-low > high, low, high)
    scales = extreme / -half
    inverse = torch.where(scales == 0, torch.zeros_like(scales), 1.0 / scales)
    integers = (blocks * inverse.unsqueeze(-1)).round_().add_(half).clamp_(0, 2 * half - 1)
    integers = integers.to(torch.uint8)  # [out, blocks, block_size]
    if scheme.bits == 4:
        integers = integers[..., ::2] | integers[..., 1::2] << 4
    return integers, scales


def dequantize_blocks(integers: Tensor, scales: Tensor, scheme: BlockScheme) -> Tensor:
    """The float weight [out, blocks * block_size] that `quantize_blocks`'s results stand for."""
    if scheme.bits == 4:
        integers = torch.stack([integers & 15, integers >> 4], dim=-1).flatten(-2)
    half = 1 << (scheme.bits - 1)
    values = (integers.float() - half) * scales.unsqueeze(-1)  # [out, blocks, block_size]
    return values.flatten(1)
