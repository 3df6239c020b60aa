"""Token lookup and the multimodal merge as a graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen3vl_export.config import ModelConfig

__all__ = ["Embedding"]


class Embedding(nn.Module):
    """Inputs and outputs are `contract.py`'s `embedding` component.

    Rows are chosen by `Where`, never by a multiply with a mask: a NaN left in an unused visual row
    times zero would still be NaN.
    """

    def __init__(self, config: ModelConfig) -> None:
        """Create the (meta) table."""
        super().__init__()
        self.embed_tokens = nn.Embedding(config.text.vocab_size, config.text.hidden_size)

    def forward(
        self,
        input_ids: Tensor,
        visual_indices: Tensor,
        visual_embeds: Tensor,
        deepstack_visual_embeds: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Merge; shapes are those of the contract."""
        is_visual = (visual_indices >= 0).unsqueeze(-1)  # [batch, seq, 1]
        rows = visual_indices.clamp(min=0)
        tokens, visuals = self.embed_tokens(input_ids), F.embedding(rows, visual_embeds)
        inputs_embeds = torch.where(is_visual, visuals, tokens)  # [batch, seq, hidden]
        if deepstack_visual_embeds is None:
            return (inputs_embeds,)
        features = deepstack_visual_embeds.index_select(1, rows.flatten())
        features = features.reshape(-1, *inputs_embeds.shape)  # [levels, batch, seq, hidden]
        return inputs_embeds, torch.where(is_visual, features, 0.0)
