"""Random checkpoints that between them switch on everything a dense Qwen3-VL can differ in."""

from __future__ import annotations

from typing import Any

from qwen3vl_tools.random_checkpoint import make_config

__all__ = ["PIXEL_LIMITS", "RANDOM_SHAPES"]

#: Small images keep the tests fast; both limits bind for ordinary test pictures.
PIXEL_LIMITS = {
    "preprocessor_config.json": {"shortest_edge": 4096, "longest_edge": 65536},
    "video_preprocessor_config.json": {"shortest_edge": 8192, "longest_edge": 131072},
}

_TEXT: dict[str, Any] = {
    "vocab_size": 448,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
        "rope_theta": 10000.0,
        "rope_type": "default",
    },
}
_VISION: dict[str, Any] = {
    "depth": 5,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "out_hidden_size": 96,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0, 2, 3],
}


def _rope(section: list[int], theta: float) -> dict[str, Any]:
    return {
        "mrope_interleaved": True,
        "mrope_section": section,
        "rope_theta": theta,
        "rope_type": "default",
    }


#: `config.json` contents by a name that says what is special about each.
RANDOM_SHAPES: dict[str, dict[str, Any]] = {
    "tied": make_config("2b", text=_TEXT, vision=_VISION),
    # As in the 8B model: an untied head, and a vision head of 72, which no power of two divides.
    "untied-head72": make_config(
        "8b",
        text=_TEXT | {"num_hidden_layers": 3, "num_key_value_heads": 4},
        vision=_VISION | {"hidden_size": 144, "num_heads": 2, "intermediate_size": 200},
    ),
    "no-deepstack": make_config(
        "2b",
        text=_TEXT | {"num_hidden_layers": 2},
        vision=_VISION | {"deepstack_visual_indexes": []},
    ),
    "four-levels": make_config(
        "2b",
        text=_TEXT
        | {
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 48,
            "attention_bias": True,
            "rope_parameters": _rope([10, 7, 7], 5000000.0),
        },
        vision=_VISION | {"depth": 6, "deepstack_visual_indexes": [4, 1, 2, 5]},
    ),
    "one-layer": make_config(
        "2b",
        text=_TEXT | {"num_hidden_layers": 1, "num_key_value_heads": 4},
        vision=_VISION
        | {"depth": 1, "deepstack_visual_indexes": [0], "spatial_merge_size": 1, "patch_size": 14},
    ),
}
