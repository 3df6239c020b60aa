"""Random Qwen3-VL checkpoints of any shape, for tests and for measuring speed and memory.

Answers are meaningless, but everything else is as in a trained model: the files, the names, the
shapes and the scale of activations and logits. Tokenizer and chat template are those of the
bundled tiny checkpoint, whatever the vocabulary's size.

    python -m qwen3vl_tools.random_checkpoint --preset 2b --output random-2b
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import COMPONENTS
from qwen3vl_export.modules import weight_sources
from qwen3vl_tools.tiny import CHECKPOINT_DIR

__all__ = ["PRESETS", "make_config", "write_random_checkpoint"]

#: Standard deviation of the logits of a random model, close to a trained one's.
_LOGIT_STD = 4.0
_SHARD_BYTES = 1 << 30
_INDEX = "model.safetensors.index.json"
#: Pixel limits of the released Qwen3-VL preprocessor files.
_PIXEL_LIMITS = {
    "preprocessor_config.json": {"shortest_edge": 65536, "longest_edge": 16777216},
    "video_preprocessor_config.json": {"shortest_edge": 4096, "longest_edge": 25165824},
}
_COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)

#: Shapes of the released dense models: their `config.json` where it differs from the defaults.
PRESETS: dict[str, dict[str, Any]] = {
    "2b": {
        "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
        },
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
    "4b": {
        "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
        },
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
    "8b": {
        "tie_word_embeddings": False,
        "text_config": {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
        },
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
}
_BASE_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": 151936,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "attention_bias": False,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_theta": 5000000.0,
            "rope_type": "default",
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl_vision",
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
        "hidden_act": "gelu_pytorch_tanh",
    },
}


def make_config(
    preset: str,
    *,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    **top_level: Any,
) -> dict[str, Any]:
    """A `config.json` of a preset with some values replaced, in the form of transformers 5.x."""
    config = copy.deepcopy(_BASE_CONFIG)
    shape = copy.deepcopy(PRESETS[preset])
    config["tie_word_embeddings"] = shape["tie_word_embeddings"]
    config["text_config"] |= shape["text_config"] | (text or {})
    config["vision_config"] |= shape["vision_config"] | (vision or {})
    tiny = json.loads((CHECKPOINT_DIR / "config.json").read_text(encoding="utf-8"))
    config |= {key: value for key, value in tiny.items() if key.endswith("_token_id")}
    return config | top_level


def write_random_checkpoint(
    folder: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    pixel_limits: dict[str, dict[str, int]] | None = None,
) -> None:
    """Write a checkpoint with random bf16 weights, at most one shard in memory at a time.

    Args:
        folder: Created; must not exist.
        config: A Qwen3-VL `config.json`.
        seed: Of the weights.
        pixel_limits: `size` entries of the two preprocessor files, by file name; the released
            models' when left out.
    """
    model = ModelConfig.from_dict(config)
    folder.mkdir(parents=True)
    _write_json(folder / "config.json", config)
    for name in _COPIED_FILES:
        shutil.copyfile(CHECKPOINT_DIR / name, folder / name)
    for name, size in (pixel_limits or _PIXEL_LIMITS).items():
        preprocessor = json.loads((CHECKPOINT_DIR / name).read_text(encoding="utf-8"))
        preprocessor |= {
            "size": size,
            "patch_size": model.vision.patch_size,
            "temporal_patch_size": model.vision.temporal_patch_size,
            "merge_size": model.vision.spatial_merge_size,
        }
        _write_json(folder / name, preprocessor)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(_shards(model, seed)):
        name = f"model-{number:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    _write_json(folder / _INDEX, {"metadata": {}, "weight_map": weight_map})


def _shards(model: ModelConfig, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        tensor.name: tensor.shape
        for component in COMPONENTS
        for source in weight_sources(component, model).values()
        for tensor in source.tensors
    }
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, shape in shapes.items():
        tensor = _random_tensor(name, shape, generator)
        if shard and size + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values that keep activations near unit scale through any depth and width."""
    values = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
    if name.endswith("bias"):
        return values * 0.1
    if "norm" in name:
        return 1.0 + values * 0.1
    if "embed_tokens" in name or name == "lm_head.weight":
        return values * (_LOGIT_STD / math.sqrt(shape[-1]))
    if "pos_embed" in name:
        return values * 0.3
    return values / math.sqrt(math.prod(shape[1:]))


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="write a random Qwen3-VL checkpoint")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="2b")
    parser.add_argument("--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--layers", type=int, help="decoder layers, instead of the preset's")
    parser.add_argument("--vision-layers", type=int, help="vision layers, DeepStack at the first 3")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.output.exists():
        print(f"error: {args.output} exists; choose another --output", file=sys.stderr)
        return 1
    text = {} if args.layers is None else {"num_hidden_layers": args.layers}
    vision: dict[str, Any] = {}
    if args.vision_layers is not None:
        levels = min(3, args.vision_layers, args.layers or 3)
        vision = {"depth": args.vision_layers, "deepstack_visual_indexes": list(range(levels))}
    config = make_config(args.preset, text=text, vision=vision)
    write_random_checkpoint(args.output, config, seed=args.seed)
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
