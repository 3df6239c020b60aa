"""Writes a model as an ordinary checkpoint folder, whole or not at all."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3VLForConditionalGeneration

from qwen3vl_tools.tiny import CHECKPOINT_DIR

__all__ = ["save_checkpoint"]

_COMPANIONS = (
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)


def save_checkpoint(model: Qwen3VLForConditionalGeneration, output: Path) -> None:
    """Saves in bfloat16 beside `output`, then puts the finished folder in its place.

    Tokenizer, processor and generation files are those of the bundled checkpoint.
    """
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    rounded = copy.deepcopy(model).bfloat16()
    config: Any = rounded.config
    for part in (config.text_config, config.vision_config):
        part.dtype = torch.bfloat16
    rounded.save_pretrained(partial)
    for name in _COMPANIONS:
        shutil.copyfile(CHECKPOINT_DIR / name, partial / name)
    shutil.rmtree(output, ignore_errors=True)
    partial.rename(output)
