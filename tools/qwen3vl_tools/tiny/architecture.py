"""The tiny model: its configuration, its fixed patch filters, and who may read which channel.

A small model left to itself sends everything through the last DeepStack level and the main
merger, so that losing level 0 or 1 would go unnoticed. Here the vision channels are divided:
colour is laid into channels only the level 0 merger reads, and movement (the difference of the
two frames of a temporal patch) into channels only the level 1 merger reads. Everything else sees
brightness, of which the main merger reads a third, so that detail comes through level 2. The
division is nothing but zeros in weight matrices; the architecture is the real one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from qwen3vl_tools.tiny.encoding import PATCH_SIZE

__all__ = ["blind_masks", "build_model", "keep_blind"]

_HIDDEN = 128
_BRIGHTNESS_FILTERS = 56
_DETAIL = slice(32, 96)
_COLOR = slice(96, 112)
_MOTION = slice(112, 128)

# Weights at which the five colours lie between dark and light backgrounds; then what tells
# colours apart and is zero for every grey.
_BRIGHTNESS = (0.28, 0.32, 0.40)
_RED_GREEN = (0.5, -0.5, 0.0)
_BLUE_YELLOW = (-0.25, -0.25, 0.5)
_SUM, _DIFFERENCE = (0.5, 0.5), (-0.5, 0.5)


def build_model(patches: NDArray[np.float32], seed: int) -> Qwen3VLForConditionalGeneration:
    """A freshly initialised model; `patches` (n, 1536) sets the scale of the patch filters."""
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(_config())
    visual: Any = model.model.visual
    filters, bias = _patch_filters(patches)
    with torch.no_grad():
        visual.patch_embed.proj.weight.copy_(filters.view_as(visual.patch_embed.proj.weight))
        visual.patch_embed.proj.bias.copy_(bias)
        nn.init.normal_(visual.pos_embed.weight, std=0.3)
        visual.pos_embed.weight[:, _COLOR.start :] = 0
    return model


def keep_blind(model: Qwen3VLForConditionalGeneration) -> None:
    """Zeroes what must not be read and keeps the gradient there zero; freezes the patch filters.

    Raises:
        ValueError: if the vision encoder is not of the width the channels are divided for.
    """
    config: Any = model.config.vision_config
    if config.hidden_size != _HIDDEN:
        raise ValueError(f"expected vision hidden size {_HIDDEN}, got {config.hidden_size}")
    for parameter in model.model.visual.patch_embed.parameters():
        parameter.requires_grad_(False)
    for weight, mask in blind_masks(model):
        with torch.no_grad():
            weight.mul_(mask)
        weight.register_hook(mask.mul)  # type: ignore[no-untyped-call]


def blind_masks(model: Qwen3VLForConditionalGeneration) -> list[tuple[nn.Parameter, Tensor]]:
    """Weights that read vision channels, each with a 0/1 row over its input columns."""
    visual: Any = model.model.visual
    neither, only_coarse = _mask(_COLOR, _MOTION), _mask(_DETAIL, _COLOR, _MOTION)
    pairs = [(block.attn.qkv.weight, neither) for block in visual.blocks]
    pairs += [(block.mlp.linear_fc1.weight, neither) for block in visual.blocks]
    hidden_for_level = (_mask(_MOTION), _mask(_COLOR), neither)
    mergers = (*visual.deepstack_merger_list, visual.merger)
    unit = visual.spatial_merge_size**2
    pairs += [
        (merger.linear_fc1.weight, mask.repeat(1, unit))
        for merger, mask in zip(mergers, (*hidden_for_level, only_coarse), strict=True)
    ]
    return pairs


def _mask(*hidden: slice) -> Tensor:
    mask = torch.ones(1, _HIDDEN)
    for channels in hidden:
        mask[:, channels] = 0
    return mask


def _patch_filters(patches: NDArray[np.float32]) -> tuple[Tensor, Tensor]:
    """Whitened cosine filters (128, 1536) and the bias that centres them."""
    bank = np.zeros((_HIDDEN, 3 * 2 * PATCH_SIZE**2), np.float64)
    brightness = _cosines(_BRIGHTNESS, _SUM, _BRIGHTNESS_FILTERS)
    bank[: len(brightness)] = brightness
    half = (_COLOR.stop - _COLOR.start) // 2
    bank[_COLOR] = np.concatenate(
        [_cosines(_RED_GREEN, _SUM, half), _cosines(_BLUE_YELLOW, _SUM, half)]
    )
    bank[_MOTION] = _cosines(_BRIGHTNESS, _DIFFERENCE, _MOTION.stop - _MOTION.start)
    seen = patches.astype(np.float64) @ bank.T  # (n, 128)
    # Still pictures have no difference of frames, so the scale counts only what is not zero.
    active = np.abs(seen) > 1e-4
    mean = seen.mean(0) * (np.arange(_HIDDEN) < _COLOR.start)
    power = np.where(active, (seen - mean) ** 2, 0).sum(0) / np.maximum(active.sum(0), 1)
    scale = 1 / np.sqrt(np.maximum(power, 1e-8)) * (np.abs(bank).sum(1) > 0)
    filters = bank * scale[:, None]
    return torch.from_numpy(filters).float(), torch.from_numpy(-mean * scale).float()


def _cosines(
    color: tuple[float, ...], frames: tuple[float, ...], count: int
) -> NDArray[np.float64]:
    """The `count` lowest two-dimensional cosines, (count, 3 * 2 * 16 * 16)."""
    waves = np.cos(
        math.pi * np.arange(PATCH_SIZE)[:, None] * (np.arange(PATCH_SIZE) + 0.5) / PATCH_SIZE
    )  # (frequency, pixel)
    lowest = sorted(
        ((v, u) for v in range(PATCH_SIZE) for u in range(PATCH_SIZE)),
        key=lambda f: (f[0] ** 2 + f[1] ** 2, f),
    )[:count]
    planes = np.stack([np.outer(waves[v], waves[u]) for v, u in lowest])
    bank = np.einsum("c,t,nyx->nctyx", color, frames, planes)
    return np.asarray(bank.reshape(count, -1))


def _config() -> Qwen3VLConfig:
    return Qwen3VLConfig(
        text_config={
            "vocab_size": 448,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "initializer_range": 0.05,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_interleaved": True,
                "mrope_section": [6, 5, 5],
            },
            "tie_word_embeddings": True,
            "bos_token_id": 410,
            "eos_token_id": 412,
        },
        vision_config={
            "hidden_size": _HIDDEN,
            "intermediate_size": 256,
            "depth": 4,
            "num_heads": 4,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1, 2],
            "out_hidden_size": 128,
            "initializer_range": 0.05,
        },
        image_token_id=422,
        video_token_id=423,
        vision_start_token_id=419,
        vision_end_token_id=420,
        tie_word_embeddings=True,
    )
