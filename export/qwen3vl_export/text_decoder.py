"""The text decoder as a graph: prefill, chunked prefill and decode are the same graph.

The KV cache has a fixed capacity and is written in place at `write_indices` (ONNX TensorScatter);
attention sees every slot up to the token's own by a boolean mask computed in the graph. DeepStack
level `i` is added after decoder layer `i`, never at the vision layers the features came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3vl_export.config import TextConfig
from qwen3vl_export.layers import Linear, RMSNorm, rotary_embedding

__all__ = ["PACKED_PROJECTIONS", "TextDecoder", "mrope_constants"]

#: Linears that a packed decoder makes of several, and the checkpoint's names of those.
PACKED_PROJECTIONS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class _MRope(nn.Module):
    """cos and sin of the interleaved multimodal rotary embedding, computed in fp32.

    Frequency `f` of a head rotates by the height position where `f % 3 == 1` and by the width
    position where `f % 3 == 2`, within three times that axis' section, else by the temporal one
    (transformers `Qwen3VLTextRotaryEmbedding.recomposition_frequencies`).
    """

    inv_freq: Tensor
    axis: Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        half = config.head_dim // 2
        self.register_buffer("inv_freq", torch.empty(half, dtype=torch.float32))
        self.register_buffer("axis", torch.empty(half, dtype=torch.int64))

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # Gather and multiply, not a one-hot product: a GPU may run fp32 products in TF32, which
        # cannot hold positions above 2048.
        positions = position_ids.index_select(0, self.axis)  # [head_dim / 2, batch, seq]
        angles = positions.permute(1, 2, 0).to(torch.float32) * self.inv_freq
        return angles.cos().to(dtype), angles.sin().to(dtype)


def mrope_constants(config: TextConfig) -> dict[str, Tensor]:
    """Values of the decoder's two computed buffers, by initializer name.

    They are filled in like weights, because a module traced on the meta device holds no data.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    axis = torch.zeros(config.head_dim // 2, dtype=torch.int64)
    for dim in (1, 2):
        axis[dim : 3 * config.mrope_section[dim] : 3] = dim
    return {"rope.inv_freq": 1.0 / config.rope_theta**exponents, "rope.axis": axis}


class _Attention(nn.Module):
    def __init__(self, config: TextConfig, *, packed: bool) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        cache_size = config.num_key_value_heads * config.head_dim
        bias = config.attention_bias
        self.sizes = [query_size, cache_size, cache_size]
        self.packed = packed
        if packed:
            self.qkv_proj = Linear(config.hidden_size, sum(self.sizes), bias=bias)
        else:
            self.q_proj = Linear(config.hidden_size, query_size, bias=bias)
            self.k_proj = Linear(config.hidden_size, cache_size, bias=bias)
            self.v_proj = Linear(config.hidden_size, cache_size, bias=bias)
        self.o_proj = Linear(query_size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor,
        write_indices: Tensor,
        past: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq, _ = x.shape
        query, key, value = map(self._split_heads, self._project(x))
        query = self.q_norm(query).transpose(1, 2)  # [batch, heads, seq, head_dim]
        key = self.k_norm(key).transpose(1, 2)  # [batch, kv_heads, seq, head_dim]
        value = value.transpose(1, 2)  # [batch, kv_heads, seq, head_dim]
        query = rotary_embedding(query, *rope)
        key = rotary_embedding(key, *rope)
        present_key = _write_cache(past[0], key, write_indices)
        present_value = _write_cache(past[1], value, write_indices)
        # The ONNX conversion refuses the flag where there is nothing to group.
        is_grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, present_key, present_value, attn_mask=mask, enable_gqa=is_grouped
        )
        out = out.transpose(1, 2).reshape(batch, seq, -1)  # [batch, seq, heads * head_dim]
        return self.o_proj(out), present_key, present_value

    def _project(self, x: Tensor) -> Sequence[Tensor]:
        if self.packed:
            return torch.split(self.qkv_proj(x), self.sizes, dim=-1)
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], -1, self.head_dim)  # [batch, seq, heads, head_dim]


def _write_cache(cache: Tensor, update: Tensor, write_indices: Tensor) -> Tensor:
    """Put `update` [batch, kv_heads, seq, dim] into the cache's slots from `write_indices` on."""
    return torch.onnx.ops.symbolic(
        "TensorScatter",
        (cache, update, write_indices),
        {"axis": -2, "mode": "linear"},
        dtype=cache.dtype,
        shape=cache.shape,
        version=24,
    )


class _Mlp(nn.Module):
    def __init__(self, config: TextConfig, *, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        if packed:
            self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        else:
            self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
            self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out


class _Layer(nn.Module):
    def __init__(self, config: TextConfig, *, packed: bool) -> None:
        super().__init__()
        self.self_attn = _Attention(config, packed=packed)
        self.mlp = _Mlp(config, packed=packed)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor,
        write_indices: Tensor,
        past: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        attn, key, value = self.self_attn(self.input_layernorm(x), rope, mask, write_indices, past)
        x = x + attn
        return x + self.mlp(self.post_attention_layernorm(x)), key, value


class TextDecoder(nn.Module):
    """The whole decoder; inputs and outputs are `contract.py`'s `decoder` component."""

    def __init__(
        self, config: TextConfig, num_deepstack_levels: int, *, packed: bool = False
    ) -> None:
        """Create the (meta) modules under the checkpoint's names.

        Args:
            config: Shape of the decoder.
            num_deepstack_levels: Levels added after the first decoder layers.
            packed: Make one linear of the query, key and value projections, and one of gate and
                up: fewer and larger products, and one quantisation of their common input.
        """
        super().__init__()
        self.num_deepstack_levels = num_deepstack_levels
        self.layers = nn.ModuleList(
            _Layer(config, packed=packed) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope = _MRope(config)

    def forward(
        self,
        inputs_embeds: Tensor,
        deepstack_embeds: Tensor | None,
        position_ids: Tensor,
        write_indices: Tensor,
        logits_indices: Tensor,
        past_key_values: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Run `seq` tokens of each row; shapes are those of the contract."""
        seq, capacity = inputs_embeds.shape[1], past_key_values[0][0].shape[2]
        device = inputs_embeds.device
        last_visible = write_indices.unsqueeze(1) + torch.arange(seq, device=device)  # [batch, seq]
        slots = torch.arange(capacity, device=device)
        mask = slots <= last_visible[:, None, :, None]  # [batch, 1, seq, capacity]
        rope = self.rope(position_ids, inputs_embeds.dtype)

        x = inputs_embeds
        present: list[tuple[Tensor, Tensor]] = []
        for index, (layer, past) in enumerate(zip(self.layers, past_key_values, strict=True)):
            x, key, value = layer(x, rope, mask, write_indices, past)
            present.append((key, value))
            if deepstack_embeds is not None and index < self.num_deepstack_levels:
                x = x + deepstack_embeds[index]

        rows = logits_indices.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        x = self.norm(torch.gather(x, 1, rows))  # [batch, num_logits, hidden]
        return self.lm_head(x).to(torch.float32), present
