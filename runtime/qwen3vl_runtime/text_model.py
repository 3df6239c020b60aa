"""The embedding and decoder graphs over one KV cache: tokens and positions in, logits out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen3vl_export.config import ModelConfig
from qwen3vl_runtime.kv_cache import KVCache
from qwen3vl_runtime.session import Sessions
from qwen3vl_runtime.vision_model import EncodedVisuals

__all__ = ["DecoderCall", "TextModel"]


@dataclass(frozen=True)
class DecoderCall:
    """The tokens of one call for every row of the batch; all arrays int64.

    Attributes:
        input_ids: [batch, seq].
        visual_indices: [batch, seq], rows of the batch's visual features, -1 on text.
        position_ids: [3, batch, seq].
        write_indices: [batch], tokens already cached in each row.
        logits_indices: [batch, num_logits], positions of this call to score.
    """

    input_ids: np.ndarray
    visual_indices: np.ndarray
    position_ids: np.ndarray
    write_indices: np.ndarray
    logits_indices: np.ndarray


class TextModel:
    """Runs decoder calls; it knows nothing of prompts, sampling or stopping."""

    def __init__(
        self,
        sessions: Sessions,
        config: ModelConfig,
        cache: KVCache,
        no_visuals: EncodedVisuals,
    ) -> None:
        """Bind the sessions to a cache; `no_visuals` is what calls without visuals pass."""
        self.cache = cache
        self.no_visuals = no_visuals
        self.capacity = 0
        self._sessions = sessions
        self._vocab_size = config.text.vocab_size
        self._has_deepstack = config.num_deepstack_levels > 0
        self._logits = np.empty((0, 0, 0), np.float32)

    def begin(self, batch: int, capacity: int) -> None:
        """Start a request of `batch` rows with an empty cache of `capacity` slots a row."""
        self.cache.begin(batch, capacity)
        self.capacity = capacity

    def forward(self, call: DecoderCall, features: EncodedVisuals) -> np.ndarray:
        """Run one call.

        Args:
            call: Tokens and positions; `write_indices + seq` must not exceed the capacity.
            features: Visual features that `visual_indices` points into.

        Returns:
            Logits float32 [batch, num_logits, vocab], overwritten by the next call.
        """
        embed_feed = {
            "input_ids": call.input_ids,
            "visual_indices": call.visual_indices,
            "visual_embeds": features.embeds,
        }
        if self._has_deepstack:
            embed_feed["deepstack_visual_embeds"] = features.deepstack
        embeds = self._sessions.embedding.run(embed_feed)
        logits = self._logits_buffer(call.logits_indices.shape)
        is_prefill = call.input_ids.shape[1] > 1
        decoder = (is_prefill and self._sessions.decoder_prefill) or self._sessions.decoder
        decoder.run(
            {
                **embeds,
                "position_ids": call.position_ids,
                "write_indices": call.write_indices,
                "logits_indices": call.logits_indices,
                **self.cache.inputs,
            },
            {"logits": logits, **self.cache.outputs},
        )
        return logits

    def _logits_buffer(self, shape: tuple[int, ...]) -> np.ndarray:
        if self._logits.shape[:2] != shape:
            self._logits = np.empty((*shape, self._vocab_size), np.float32)
        return self._logits
