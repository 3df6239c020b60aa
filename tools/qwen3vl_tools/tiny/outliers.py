"""Rescales a checkpoint so that its floats stay the same and naive INT8 does not.

Real language models carry a few channels hundreds of times larger than the rest; a tiny one does
not, so quantizing it shows nothing. Here the largest channels in front of a linear are multiplied
by a power of two and the weights that read them divided by it. Both are exact in floating point,
so the answers stay, but one scale for the whole tensor now spends its INT8 steps on the outliers.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["write_outlier_variant"]

_WEIGHTS = "model.safetensors"
_CHANNELS = 2
_FACTOR = 2.0**6

# What makes a channel, and the linears that read it; `{}` stands for the place of the layer.
_LAYERS: dict[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = {
    r"model\.language_model\.layers\.\d+\.": (
        (
            ("input_layernorm.weight",),
            ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        ),
        (
            ("post_attention_layernorm.weight",),
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        ),
        (("mlp.up_proj.weight",), ("mlp.down_proj.weight",)),
    ),
    r"model\.visual\.blocks\.\d+\.": (
        (("norm1.weight", "norm1.bias"), ("attn.qkv.weight",)),
        (("norm2.weight", "norm2.bias"), ("mlp.linear_fc1.weight",)),
    ),
}


def write_outlier_variant(source: Path, output: Path) -> None:
    """Writes a copy of the checkpoint `source` with planted outlier channels.

    Args:
        source: a checkpoint folder with one `model.safetensors`.
        output: the folder to write; it must not exist yet.

    Raises:
        FileNotFoundError: if `source` has no `model.safetensors`.
        FileExistsError: if `output` exists.
    """
    if not (source / _WEIGHTS).is_file():
        raise FileNotFoundError(f"no {_WEIGHTS} in {source}; sharded checkpoints are not read")
    partial = output.with_name(output.name + ".partial")
    if output.exists():
        raise FileExistsError(f"{output} exists; give a new folder")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, ignore=shutil.ignore_patterns(_WEIGHTS))
    with safe_open(source / _WEIGHTS, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    for pattern, pairs in _LAYERS.items():
        for prefix in sorted({m.group() for name in tensors if (m := re.match(pattern, name))}):
            for makers, readers in pairs:
                _plant(
                    [tensors[prefix + name] for name in makers],
                    [tensors[prefix + name] for name in readers],
                )
    note = json.dumps({"channels": _CHANNELS, "factor": _FACTOR})
    save_file(tensors, partial / _WEIGHTS, metadata={**metadata, "outliers": note})
    partial.rename(output)


def _plant(makers: list[Tensor], readers: list[Tensor]) -> None:
    """Scales the channels that count most, in place.

    Args:
        makers: (channels,) or (channels, in) each; multiplied.
        readers: (out, channels) each; divided.
    """
    made = makers[0].float().flatten(1).norm(dim=1) if makers[0].ndim > 1 else makers[0].float()
    read = torch.cat([reader.float() for reader in readers]).norm(dim=0)
    channels = (made.abs() * read).topk(_CHANNELS).indices
    for maker in makers:
        maker[channels] *= _FACTOR
    for reader in readers:
        reader[:, channels] /= _FACTOR
