"""The KV cache: one preallocated buffer a tensor, laid out anew for each request."""

from __future__ import annotations

import math

import numpy as np

from qwen3vl_export.config import TextConfig
from qwen3vl_export.contract import past_names, present_names

__all__ = ["KVCache"]


class KVCache:
    """Buffers of all layers' keys and values.

    Batch is the outermost axis, so any number of rows up to `max_batch`, at any capacity up to
    `capacity`, is a contiguous view of the same memory: a short request does not pay for the
    longest one.
    """

    def __init__(
        self, config: TextConfig, dtype: np.dtype[np.generic], max_batch: int, capacity: int
    ) -> None:
        """Reserve the memory; the operating system maps pages when they are first written."""
        self.max_batch = max_batch
        self.capacity = capacity
        self._row_shape = (config.num_key_value_heads, config.head_dim)
        size = max_batch * capacity * math.prod(self._row_shape)
        layers = range(config.num_hidden_layers)
        self._past = [name for layer in layers for name in past_names(layer)]
        self._present = [name for layer in layers for name in present_names(layer)]
        self._buffers = [np.zeros(size, dtype) for _ in self._past]
        self._views: list[np.ndarray] = []

    def begin(self, batch: int, capacity: int) -> None:
        """Lay out zeroed views of [batch, kv_heads, capacity, head_dim].

        Zeroed, because a mask hides an unused slot's score but not its value: the attention
        weight 0 times a NaN left by an earlier request would still be NaN.
        """
        assert batch <= self.max_batch
        assert capacity <= self.capacity
        kv_heads, head_dim = self._row_shape
        shape = (batch, kv_heads, capacity, head_dim)
        self._views = [buffer[: math.prod(shape)].reshape(shape) for buffer in self._buffers]
        for view in self._views:
            view.fill(0)

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """The views by the decoder's input names."""
        return dict(zip(self._past, self._views, strict=True))

    @property
    def outputs(self) -> dict[str, np.ndarray]:
        """The same views by the decoder's output names: written in place."""
        return dict(zip(self._present, self._views, strict=True))
