"""The vision encoder as a graph: patches of equally sized frames in, visual tokens out.

Attention is full inside a frame and never crosses frames, which is what `cu_seqlens` means in
Qwen3-VL: one window a temporal patch. With frames as the batch axis no mask is needed and nothing
is padded. Positions come in as tensors, so no image size is baked into the graph.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3vl_export.config import VisionConfig
from qwen3vl_export.layers import Linear, rotary_embedding

__all__ = ["VisionEncoder"]

#: Fixed in transformers' `Qwen3VLVisionBlock` and `Qwen3VLVisionPatchMerger`.
_LAYER_NORM_EPS = 1e-6


def _gelu(hidden_act: str) -> nn.GELU:
    return nn.GELU(approximate="tanh" if hidden_act == "gelu_pytorch_tanh" else "none")


class _PatchEmbed(nn.Module):
    """The 3-D convolution, whose kernel equals its stride, as the matrix product that it is."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = Linear(config.patch_dim, config.hidden_size, bias=True)

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden: Tensor = self.proj(pixel_values)
        return hidden


class _Attention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=True)
        self.proj = Linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (self._split_heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        query = rotary_embedding(query, cos, sin)
        key = rotary_embedding(key, cos, sin)
        out = F.scaled_dot_product_attention(query, key, value)
        merged: Tensor = self.proj(out.transpose(1, 2).flatten(2))  # [frames, patches, hidden]
        return merged

    def _split_heads(self, x: Tensor) -> Tensor:
        x = x.reshape(*x.shape[:2], self.num_heads, self.head_dim)
        return x.transpose(1, 2)  # [frames, heads, patches, head_dim]


class _Mlp(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = Linear(config.hidden_size, config.intermediate_size, bias=True)
        self.linear_fc2 = Linear(config.intermediate_size, config.hidden_size, bias=True)
        self.act_fn = _gelu(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(self.act_fn(self.linear_fc1(x)))
        return out


class _Block(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=_LAYER_NORM_EPS)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=_LAYER_NORM_EPS)
        self.attn = _Attention(config)
        self.mlp = _Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        x = x + self.mlp(self.norm2(x))
        return x


class _PatchMerger(nn.Module):
    """Joins each `merge x merge` square of patches into one visual token of the text width."""

    def __init__(self, config: VisionConfig, *, use_postshuffle_norm: bool) -> None:
        super().__init__()
        self.merged_size = config.hidden_size * config.merge_unit
        self.use_postshuffle_norm = use_postshuffle_norm
        norm_size = self.merged_size if use_postshuffle_norm else config.hidden_size
        self.norm = nn.LayerNorm(norm_size, eps=_LAYER_NORM_EPS)
        self.linear_fc1 = Linear(self.merged_size, self.merged_size, bias=True)
        self.act_fn = _gelu("gelu")
        self.linear_fc2 = Linear(self.merged_size, config.out_hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        if not self.use_postshuffle_norm:
            x = self.norm(x)
        x = x.reshape(x.shape[0], -1, self.merged_size)  # [frames, merged_patches, merged_size]
        if self.use_postshuffle_norm:
            x = self.norm(x)
        out: Tensor = self.linear_fc2(self.act_fn(self.linear_fc1(x)))
        return out


class VisionEncoder(nn.Module):
    """The whole encoder; inputs and outputs are `contract.py`'s `vision` component."""

    def __init__(self, config: VisionConfig) -> None:
        """Create the (meta) modules under the checkpoint's names."""
        super().__init__()
        self.patch_embed = _PatchEmbed(config)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.depth))
        self.merger = _PatchMerger(config, use_postshuffle_norm=False)
        self.deepstack_merger_list = nn.ModuleList(
            _PatchMerger(config, use_postshuffle_norm=True) for _ in config.deepstack_visual_indexes
        )
        self.merger_of_layer = {
            layer: merger for merger, layer in enumerate(config.deepstack_visual_indexes)
        }

    def forward(
        self,
        pixel_values: Tensor,
        pos_embed_indices: Tensor,
        pos_embed_weights: Tensor,
        rotary_cos: Tensor,
        rotary_sin: Tensor,
    ) -> tuple[Tensor, ...]:
        """Encode frames; shapes are those of the contract."""
        frames = pixel_values.shape[0]
        pos_embeds = self.pos_embed(pos_embed_indices) * pos_embed_weights.unsqueeze(-1)
        x = self.patch_embed(pixel_values) + pos_embeds.sum(0)  # [frames, patches, hidden]
        cos = rotary_cos.expand(frames, -1, -1)  # [frames, patches, head_dim / 2]
        sin = rotary_sin.expand(frames, -1, -1)

        deepstack: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin)
            if layer in self.merger_of_layer:
                deepstack.append(self.deepstack_merger_list[self.merger_of_layer[layer]](x))
        image_embeds = self.merger(x)
        if not deepstack:
            return (image_embeds,)
        return image_embeds, torch.stack(deepstack)  # [levels, frames, merged_patches, hidden]
