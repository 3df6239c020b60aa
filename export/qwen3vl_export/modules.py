"""The three components as torch modules, and where in a checkpoint each of their weights lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.embedding import Embedding
from qwen3vl_export.layers import Linear
from qwen3vl_export.text_decoder import TextDecoder
from qwen3vl_export.vision_encoder import VisionEncoder

__all__ = ["WeightSource", "make_module", "weight_sources"]

_EMBEDDING_WEIGHT = "model.language_model.embed_tokens.weight"
_PREFIXES = {
    "vision": "model.visual.",
    "embedding": "model.language_model.",
    "decoder": "model.language_model.",
}


@dataclass(frozen=True)
class WeightSource:
    """Where a graph's weight comes from.

    Attributes:
        tensor: Name in the checkpoint.
        shape: Shape in the checkpoint.
        transposed: The graph stores it [in, out], the checkpoint [out, in(, ...)].
    """

    tensor: str
    shape: tuple[int, ...]
    transposed: bool


def make_module(component: str, config: ModelConfig, dtype: torch.dtype) -> nn.Module:
    """The component's module with parameters of `dtype`; call it under a FakeTensorMode."""
    default = torch.get_default_dtype()
    # Computed buffers keep the types they are created with, which `module.to(dtype)` would change.
    torch.set_default_dtype(dtype)
    try:
        if component == "vision":
            return VisionEncoder(config.vision).eval()
        if component == "embedding":
            return Embedding(config).eval()
        return TextDecoder(config.text, config.num_deepstack_levels).eval()
    finally:
        torch.set_default_dtype(default)


def weight_sources(component: str, config: ModelConfig) -> dict[str, WeightSource]:
    """The checkpoint tensor of every weight of a component, by initializer name."""
    with FakeTensorMode():
        module = make_module(component, config, torch.float32)
    transposed = {
        f"{name}.weight" for name, layer in module.named_modules() if isinstance(layer, Linear)
    }
    return {
        name: WeightSource(
            tensor=_checkpoint_name(component, name, config),
            shape=_checkpoint_shape(name, tuple(parameter.shape), name in transposed, config),
            transposed=name in transposed,
        )
        for name, parameter in module.named_parameters()
    }


def _checkpoint_name(component: str, name: str, config: ModelConfig) -> str:
    if name == "lm_head.weight":
        return _EMBEDDING_WEIGHT if config.tie_word_embeddings else name
    return _PREFIXES[component] + name


def _checkpoint_shape(
    name: str, shape: tuple[int, ...], transposed: bool, config: ModelConfig
) -> tuple[int, ...]:
    vision = config.vision
    if name == "patch_embed.proj.weight":
        kernel = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        return (vision.hidden_size, vision.in_channels, *kernel)
    return shape[::-1] if transposed else shape
