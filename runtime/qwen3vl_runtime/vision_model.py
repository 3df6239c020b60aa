"""The vision graph: images and video frames in, visual tokens with their DeepStack features out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.errors import InputError
from qwen3vl_runtime.image_processor import VisualInput
from qwen3vl_runtime.positions import vision_positions
from qwen3vl_runtime.session import Session

__all__ = ["EncodedVisuals", "VisionModel"]

#: Frames are encoded in calls of at most this many attention scores a head (frames * patches^2),
#: to bound memory: 16 heads take 2 GiB in fp32. Frames do not attend to each other, so the split
#: changes nothing.
_MAX_SCORES_PER_CALL = 1 << 25
_CACHED_GRIDS = 64


@dataclass(frozen=True)
class EncodedVisuals:
    """Visual tokens of any number of images and videos, in the graph's float type.

    Attributes:
        embeds: [visual, hidden].
        deepstack: [levels, visual, hidden].
    """

    embeds: np.ndarray
    deepstack: np.ndarray

    @classmethod
    def none(cls, config: ModelConfig, dtype: np.dtype[np.generic]) -> EncodedVisuals:
        """One unused row, which is what the embedding graph takes when there are no visuals."""
        hidden = config.text.hidden_size
        return cls(
            np.zeros((1, hidden), dtype),
            np.zeros((config.num_deepstack_levels, 1, hidden), dtype),
        )

    @classmethod
    def from_features(
        cls, features: np.ndarray, config: ModelConfig, dtype: np.dtype[np.generic]
    ) -> EncodedVisuals:
        """Split [visual, hidden * (1 + levels)], the final features then each level's.

        Raises:
            InputError: A value is beyond the range of `dtype`.
        """
        levels, hidden = config.num_deepstack_levels, config.text.hidden_size
        with np.errstate(over="ignore"):  # said below, in one sentence
            parts = features.astype(dtype).reshape(len(features), 1 + levels, hidden)
        if not np.isfinite(parts).all():
            raise InputError(
                f"precomputed features must fit into the bundle's {dtype}, found a value beyond "
                "its range; export the bundle at a higher precision"
            )
        parts = np.ascontiguousarray(parts.transpose(1, 0, 2))  # [1 + levels, visual, hidden]
        return cls(parts[0], parts[1:])

    @classmethod
    def concatenate(cls, parts: Sequence[EncodedVisuals]) -> EncodedVisuals:
        """All tokens of `parts`, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.embeds for part in parts]),
            np.concatenate([part.deepstack for part in parts], axis=1),
        )


class VisionModel:
    """Encodes visuals; those with equal frame sizes share a call."""

    def __init__(self, session: Session, config: ModelConfig, dtype: np.dtype[np.generic]) -> None:
        """Wrap the vision session; `dtype` is the graph's float type."""
        self._session = session
        self._config = config
        self._dtype = dtype
        self._positions = lru_cache(maxsize=_CACHED_GRIDS)(self._position_inputs)

    def encode(self, visuals: Sequence[VisualInput]) -> list[EncodedVisuals]:
        """Features of each visual, in the order given."""
        by_grid: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, visual in enumerate(visuals):
            by_grid[visual.grid_thw[1:]].append(index)
        features: dict[int, EncodedVisuals] = {}
        for grid, members in by_grid.items():
            frames = np.concatenate([visuals[index].pixel_values for index in members])
            encoded = self._encode_frames(frames, grid)
            tokens = np.cumsum([self._num_tokens(visuals[index]) for index in members])
            embeds = np.split(encoded.embeds, tokens[:-1])
            deepstack = np.split(encoded.deepstack, tokens[:-1], axis=1)
            for index, embed, levels in zip(members, embeds, deepstack, strict=True):
                features[index] = EncodedVisuals(embed, levels)
        return [features[index] for index in range(len(visuals))]

    def _num_tokens(self, visual: VisualInput) -> int:
        return math.prod(visual.grid_thw) // self._config.vision.merge_unit

    def _encode_frames(self, frames: np.ndarray, grid: tuple[int, int]) -> EncodedVisuals:
        """Encode [frames, patches, patch_dim], all of the grid (height, width) in patches."""
        per_call = max(1, _MAX_SCORES_PER_CALL // frames.shape[1] ** 2)
        parts = []
        for start in range(0, len(frames), per_call):
            # A value beyond the range of a half float is no surprise worth a warning: it becomes
            # infinite, which the sampler finds in the logits.
            with np.errstate(over="ignore"):
                pixels = np.ascontiguousarray(frames[start : start + per_call], self._dtype)
            outputs = self._session.run({"pixel_values": pixels, **self._positions(grid)})
            parts.append(self._flatten(outputs))
        return EncodedVisuals.concatenate(parts)

    def _flatten(self, outputs: dict[str, np.ndarray]) -> EncodedVisuals:
        levels, hidden = self._config.num_deepstack_levels, self._config.text.hidden_size
        embeds = outputs["image_embeds"].reshape(-1, hidden)  # [visual, hidden]
        if levels == 0:
            return EncodedVisuals(embeds, np.zeros((0, len(embeds), hidden), self._dtype))
        deepstack = outputs["deepstack_embeds"].reshape(levels, -1, hidden)
        return EncodedVisuals(embeds, deepstack)  # [levels, visual, hidden]

    def _position_inputs(self, grid: tuple[int, int]) -> dict[str, np.ndarray]:
        positions = vision_positions(*grid, self._config.vision)
        return {
            "pos_embed_indices": positions.pos_embed_indices,
            "pos_embed_weights": positions.pos_embed_weights.astype(self._dtype),
            "rotary_cos": positions.rotary_cos.astype(self._dtype),
            "rotary_sin": positions.rotary_sin.astype(self._dtype),
        }
