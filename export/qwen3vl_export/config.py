"""A Hugging Face Qwen3-VL `config.json`, parsed once into frozen dataclasses.

Everything downstream reads these and never the JSON. Both spellings of the rotary settings are
understood: `rope_scaling` + `rope_theta` (transformers 4.57) and `rope_parameters` (5.x). Values a
file leaves out take the default of transformers' `configuration_qwen3_vl.py`, because transformers
itself omits values that equal its default; what this toolkit cannot convert is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen3vl_export.config_fields import (
    MAX_SIZE,
    get_mapping,
    get_optional_mapping,
    get_positive,
    get_positive_float,
    get_token_id,
    get_value,
)
from qwen3vl_export.errors import CheckpointError, UnsupportedModelError

__all__ = ["ModelConfig", "TextConfig", "VisionConfig"]

_VISION_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")
_MAX_LAYERS = 1024


@dataclass(frozen=True)
class VisionConfig:
    """Shape of the vision encoder; field names follow `Qwen3VLVisionConfig`."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    hidden_act: str
    rope_theta: float

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Number of values in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge_unit(self) -> int:
        """Patches that merge into one visual token."""
        return self.spatial_merge_size**2

    @property
    def num_grid_per_side(self) -> int:
        """Side of the square grid of learned position embeddings."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def num_deepstack_levels(self) -> int:
        """Number of vision layers whose features are added to the first decoder layers."""
        return len(self.deepstack_visual_indexes)


@dataclass(frozen=True)
class TextConfig:
    """Shape of the text decoder; field names follow `Qwen3VLTextConfig`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool
    rope_theta: float
    mrope_section: tuple[int, int, int]


@dataclass(frozen=True)
class ModelConfig:
    """A dense Qwen3-VL model: vision encoder, text decoder and the special token ids."""

    vision: VisionConfig
    text: TextConfig
    tie_word_embeddings: bool
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int

    @property
    def num_deepstack_levels(self) -> int:
        """DeepStack levels; level `i` is added after decoder layer `i`."""
        return self.vision.num_deepstack_levels

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Parse the content of a Hugging Face `config.json`.

        Raises:
            UnsupportedModelError: The model is not a dense, unquantised Qwen3-VL.
            CheckpointError: A value is missing, of the wrong type, or contradicts another.
        """
        _refuse_other_models(config)
        vision = _parse_vision(get_mapping(config, "vision_config"))
        text = _parse_text(get_mapping(config, "text_config"))
        vocab_size = text.vocab_size
        parsed = cls(
            vision=vision,
            text=text,
            tie_word_embeddings=get_value(config, "tie_word_embeddings", bool, False),
            image_token_id=get_token_id(config, "image_token_id", 151655, vocab_size),
            video_token_id=get_token_id(config, "video_token_id", 151656, vocab_size),
            vision_start_token_id=get_token_id(config, "vision_start_token_id", 151652, vocab_size),
            vision_end_token_id=get_token_id(
                config, "vision_end_token_id", 151653, text.vocab_size
            ),
        )
        _check_sizes(parsed)
        _check_consistency(parsed)
        return parsed


def _refuse_other_models(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type")
    if model_type != "qwen3_vl":
        raise UnsupportedModelError(
            f"expected a dense Qwen3-VL checkpoint (model_type 'qwen3_vl'), found model_type "
            f"{model_type!r}; this toolkit converts no other architecture"
        )
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UnsupportedModelError(
            f"expected floating-point weights, found a checkpoint quantised with {method!r}; "
            "use the unquantised checkpoint it was made from"
        )


def _parse_vision(config: Mapping[str, Any]) -> VisionConfig:
    hidden_act = get_value(config, "hidden_act", str, "gelu_pytorch_tanh")
    if hidden_act not in _VISION_ACTIVATIONS:
        raise UnsupportedModelError(
            f"vision_config.hidden_act must be one of {_VISION_ACTIVATIONS}, found {hidden_act!r}"
        )
    rope = get_optional_mapping(config, "rope_parameters")
    rope_type = rope.get("rope_type", "axial")
    # transformers reads "default" as "axial" here.
    if rope_type not in ("axial", "default"):
        raise UnsupportedModelError(
            f"vision_config.rope_parameters.rope_type must be 'axial', found {rope_type!r}"
        )
    indexes = config.get("deepstack_visual_indexes", (8, 16, 24))
    if not isinstance(indexes, (list, tuple)) or not all(type(i) is int for i in indexes):
        raise CheckpointError(
            f"vision_config.deepstack_visual_indexes must be a list of integers, found {indexes!r}"
        )
    return VisionConfig(
        depth=get_positive(config, "depth", 27, _MAX_LAYERS),
        hidden_size=get_positive(config, "hidden_size", 1152),
        intermediate_size=get_positive(config, "intermediate_size", 4304),
        num_heads=get_positive(config, "num_heads", 16),
        in_channels=get_positive(config, "in_channels", 3),
        patch_size=get_positive(config, "patch_size", 16),
        temporal_patch_size=get_positive(config, "temporal_patch_size", 2),
        spatial_merge_size=get_positive(config, "spatial_merge_size", 2),
        out_hidden_size=get_positive(config, "out_hidden_size", 3584),
        num_position_embeddings=get_positive(config, "num_position_embeddings", 2304),
        deepstack_visual_indexes=tuple(indexes),
        hidden_act=hidden_act,
        rope_theta=get_positive_float(rope, "rope_theta", 10000.0),
    )


def _parse_text(config: Mapping[str, Any]) -> TextConfig:
    hidden_act = get_value(config, "hidden_act", str, "silu")
    if hidden_act != "silu":
        raise UnsupportedModelError(f"text_config.hidden_act must be 'silu', found {hidden_act!r}")
    rope_theta, mrope_section = _parse_text_rope(config)
    num_heads = get_positive(config, "num_attention_heads", 32)
    if config.get("num_key_value_heads", 32) is None:
        config = {**config, "num_key_value_heads": num_heads}
    return TextConfig(
        vocab_size=get_positive(config, "vocab_size", 151936),
        hidden_size=get_positive(config, "hidden_size", 4096),
        intermediate_size=get_positive(config, "intermediate_size", 22016),
        num_hidden_layers=get_positive(config, "num_hidden_layers", 32, _MAX_LAYERS),
        num_attention_heads=num_heads,
        num_key_value_heads=get_positive(config, "num_key_value_heads", 32),
        head_dim=get_positive(config, "head_dim", 128),
        max_position_embeddings=get_positive(config, "max_position_embeddings", 128000),
        rms_norm_eps=get_positive_float(config, "rms_norm_eps", 1e-6),
        attention_bias=get_value(config, "attention_bias", bool, False),
        rope_theta=rope_theta,
        mrope_section=mrope_section,
    )


def _parse_text_rope(config: Mapping[str, Any]) -> tuple[float, tuple[int, int, int]]:
    """Rotary base and the M-RoPE sections, from either spelling of the config."""
    rope = get_optional_mapping(config, "rope_scaling") or get_optional_mapping(
        config, "rope_parameters"
    )
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "mrope"):
        raise UnsupportedModelError(
            f"text_config rotary type must be 'default', found {rope_type!r}; "
            "scaled rotary embeddings are not converted"
        )
    if rope.get("mrope_interleaved", True) is not True:
        raise UnsupportedModelError(
            "text_config has mrope_interleaved=false, but Qwen3-VL interleaves its M-RoPE sections"
        )
    section = rope.get("mrope_section", (24, 20, 20))
    is_list = isinstance(section, (list, tuple)) and len(section) == 3
    if not is_list or not all(type(n) is int and n >= 0 for n in section):
        raise CheckpointError(f"mrope_section must be three lengths, found {section!r}")
    rope_theta = get_positive_float(
        rope if "rope_theta" in rope else config, "rope_theta", 500000.0
    )
    return rope_theta, (section[0], section[1], section[2])


def _check_sizes(config: ModelConfig) -> None:
    """Refuse products of plausible sizes that are not plausible themselves."""
    vision, text = config.vision, config.text
    for size, meaning in (
        (vision.patch_dim, "in_channels * temporal_patch_size * patch_size ** 2"),
        (vision.hidden_size * vision.merge_unit, "vision hidden_size * spatial_merge_size ** 2"),
        (text.num_attention_heads * text.head_dim, "num_attention_heads * head_dim"),
    ):
        if size > MAX_SIZE:
            raise CheckpointError(
                f"config.json: {meaning} must be at most {MAX_SIZE}, found {size}"
            )


def _check_consistency(config: ModelConfig) -> None:
    """Refuse contradictions that would otherwise surface as shape errors or wrong answers."""
    vision, text = config.vision, config.text
    indexes = vision.deepstack_visual_indexes
    checks = (
        (
            vision.hidden_size % (4 * vision.num_heads) == 0,
            f"vision hidden_size {vision.hidden_size} must be a multiple of 4 * num_heads "
            f"({vision.num_heads}): height and width each rotate half of a head",
        ),
        (
            vision.num_grid_per_side**2 == vision.num_position_embeddings,
            f"num_position_embeddings {vision.num_position_embeddings} must be a square",
        ),
        (
            vision.out_hidden_size == text.hidden_size,
            f"vision out_hidden_size {vision.out_hidden_size} must equal the text hidden_size "
            f"{text.hidden_size}",
        ),
        (
            text.num_attention_heads % text.num_key_value_heads == 0,
            f"num_attention_heads {text.num_attention_heads} must be a multiple of "
            f"num_key_value_heads {text.num_key_value_heads}",
        ),
        (
            text.head_dim % 2 == 0 and sum(text.mrope_section) == text.head_dim // 2,
            f"mrope_section {list(text.mrope_section)} must add up to half of head_dim "
            f"{text.head_dim}",
        ),
        (
            len(set(indexes)) == len(indexes) and all(0 <= i < vision.depth for i in indexes),
            f"deepstack_visual_indexes {list(indexes)} must be different layers below the vision "
            f"depth {vision.depth}",
        ),
        (
            len(indexes) <= text.num_hidden_layers,
            f"{len(indexes)} DeepStack levels need as many decoder layers, found "
            f"{text.num_hidden_layers}",
        ),
    )
    for holds, message in checks:
        if not holds:
            raise CheckpointError(f"config.json contradicts itself: {message}")
