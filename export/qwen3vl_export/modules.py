"""The three components as torch modules, and where in a checkpoint each of their weights lies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.embedding import Embedding
from qwen3vl_export.layers import Linear
from qwen3vl_export.text_decoder import PACKED_PROJECTIONS, TextDecoder
from qwen3vl_export.vision_encoder import VisionEncoder

__all__ = [
    "EMBEDDING_WEIGHT",
    "HEAD_WEIGHT",
    "StoredTensor",
    "WeightSource",
    "make_module",
    "weight_sources",
]

#: Names in the checkpoint of the two weights that a model may tie.
HEAD_WEIGHT = "lm_head.weight"
EMBEDDING_WEIGHT = "model.language_model.embed_tokens.weight"
_PREFIXES = {
    "vision": "model.visual.",
    "embedding": "model.language_model.",
    "decoder": "model.language_model.",
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightSource:
    """What a graph's weight is made of.

    Attributes:
        tensors: Stored tensors, joined along the output axis; one unless projections are packed.
        transposed: The graph stores it [in, out], the checkpoint [out, in(, ...)].
    """

    tensors: tuple[StoredTensor, ...]
    transposed: bool

    @property
    def num_values(self) -> int:
        """Number of values in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)


def make_module(
    component: str, config: ModelConfig, dtype: torch.dtype, *, packed: bool = False
) -> nn.Module:
    """The component's module with parameters of `dtype`; call it under a FakeTensorMode.

    Args:
        component: One of `contract.COMPONENTS`.
        config: Shape of the model.
        dtype: Of the parameters.
        packed: Join the decoder's projections of one input into one linear.
    """
    default = torch.get_default_dtype()
    # Computed buffers keep the types they are created with, which `module.to(dtype)` would change.
    torch.set_default_dtype(dtype)
    try:
        if component == "vision":
            return VisionEncoder(config.vision).eval()
        if component == "embedding":
            return Embedding(config).eval()
        return TextDecoder(config.text, config.num_deepstack_levels, packed=packed).eval()
    finally:
        torch.set_default_dtype(default)


def weight_sources(
    component: str, config: ModelConfig, *, packed: bool = False
) -> dict[str, WeightSource]:
    """What every weight of a component is made of, by initializer name.

    Args:
        component: One of `contract.COMPONENTS`.
        config: Shape of the model.
        packed: As in `make_module`.
    """
    shapes, transposed = _parameters(component, config, packed=False)
    stored = {
        name: StoredTensor(
            _checkpoint_name(component, name, config),
            _checkpoint_shape(name, shape, name in transposed, config),
        )
        for name, shape in shapes.items()
    }
    if packed:
        shapes, transposed = _parameters(component, config, packed=True)
    return {
        name: WeightSource(
            tuple(stored[part] for part in _unpacked_names(name)), name in transposed
        )
        for name in shapes
    }


def _parameters(
    component: str, config: ModelConfig, *, packed: bool
) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Shapes of a module's parameters by name, and which of them are weights of linears."""
    with FakeTensorMode():
        module = make_module(component, config, torch.float32, packed=packed)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    linears = {
        f"{name}.weight" for name, layer in module.named_modules() if isinstance(layer, Linear)
    }
    return shapes, linears


def _unpacked_names(name: str) -> list[str]:
    """Parameters that a packed one is made of; a name that is not packed stands for itself."""
    for packed, parts in PACKED_PROJECTIONS.items():
        if f".{packed}." in name:
            return [name.replace(packed, part) for part in parts]
    return [name]


def _checkpoint_name(component: str, name: str, config: ModelConfig) -> str:
    if name == HEAD_WEIGHT:
        return EMBEDDING_WEIGHT if config.tie_word_embeddings else name
    return _PREFIXES[component] + name


def _checkpoint_shape(
    name: str, shape: tuple[int, ...], transposed: bool, config: ModelConfig
) -> tuple[int, ...]:
    vision = config.vision
    if name == "patch_embed.proj.weight":
        kernel = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        return (vision.hidden_size, vision.in_channels, *kernel)
    return shape[::-1] if transposed else shape
