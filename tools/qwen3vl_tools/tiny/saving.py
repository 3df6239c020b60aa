"""Writes a model as an ordinary checkpoint folder, whole or not at all."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

from transformers import Qwen3VLForConditionalGeneration

from qwen3vl_tools.tiny import CHECKPOINT_DIR

__all__ = ["copy_companions", "save_checkpoint"]

_COMPANIONS = (
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)


def save_checkpoint(model: Qwen3VLForConditionalGeneration, output: Path) -> None:
    """Saves in bfloat16 beside `output`, then puts the finished folder in its place."""
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    copy.deepcopy(model).bfloat16().save_pretrained(partial)
    copy_companions(CHECKPOINT_DIR, partial)
    shutil.rmtree(output, ignore_errors=True)
    partial.rename(output)


def copy_companions(source: Path, output: Path) -> None:
    """Copies the tokenizer, processor and generation files of a checkpoint."""
    for name in _COMPANIONS:
        shutil.copyfile(source / name, output / name)
