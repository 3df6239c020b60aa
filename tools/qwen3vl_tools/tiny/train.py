"""Trains the tiny Qwen3-VL from scratch on a CPU, in one run of at most 40 minutes.

Every step draws new pictures and asks up to four questions about each. The result is an ordinary
checkpoint folder; see README.md for the recipe and what it reaches.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen3VLForConditionalGeneration

from qwen3vl_tools.tiny import CHECKPOINT_DIR
from qwen3vl_tools.tiny.architecture import build_model, keep_blind
from qwen3vl_tools.tiny.batching import Batch, collate
from qwen3vl_tools.tiny.encoding import IGNORED, Codec
from qwen3vl_tools.tiny.forward import answer_logits, encode
from qwen3vl_tools.tiny.saving import save_checkpoint
from qwen3vl_tools.tiny.scenes import FAMILIES, make_picture
from qwen3vl_tools.tiny.teacher import Lessons, Teacher, lessons

__all__ = ["TrainOptions", "train"]

_FAMILY_SHARE = {"scene": 0.34, "number": 0.32, "two": 0.10, "moving": 0.18, "changing": 0.06}
_MAX_QUESTIONS = 4
_CHAT_SHARE = 0.15  # of pictures with several questions
_NESTED_SHARE = 0.5  # of videos
_FINAL_RATE = 0.02
_TEACHER_END = 0.8  # of the run


@dataclass(frozen=True)
class TrainOptions:
    """How to train.

    Attributes:
        output: the checkpoint folder to write.
        init_from: continue from these weights instead of fresh ones.
        steps: optimizer steps at most.
        minutes: wall time at most; the learning rate decays to the end of whichever comes first.
        pictures: pictures a step.
        learning_rate: the peak.
        warmup: steps to the peak.
        teacher: weight of the vision lessons at the start; it falls to zero.
        seed: of the weights and the pictures.
        save_every: steps between checkpoints, so that a stopped run leaves one.
    """

    output: Path
    init_from: Path | None = None
    steps: int = 5000
    minutes: float = 40.0
    pictures: int = 32
    learning_rate: float = 2e-3
    warmup: int = 150
    teacher: float = 1.0
    seed: int = 0
    save_every: int = 500


def train(options: TrainOptions) -> None:
    """Trains and saves one model.

    Raises:
        FileExistsError: if the output folder exists; saving would replace it.
    """
    if options.output.exists():
        raise FileExistsError(f"{options.output} exists; give a new folder")
    rng = np.random.default_rng(options.seed)
    codec = Codec(CHECKPOINT_DIR)
    model = _start(options, codec, rng)
    keep_blind(model)
    config: Any = model.config
    teacher = Teacher(config.vision_config.hidden_size, config.text_config.hidden_size)
    optimizer = _optimizer(model, teacher, options.learning_rate)
    visual_ids = (config.image_token_id, config.video_token_id)
    started, progress = time.monotonic(), 0.0
    for step, parts in enumerate(_parts(codec, visual_ids, options.pictures, rng), start=1):
        rate = min(1.0, step / options.warmup) * _decay(progress)
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * rate
        teacher_weight = options.teacher * max(0.0, 1 - progress / _TEACHER_END)
        losses = _step(model, teacher, optimizer, parts, teacher_weight)
        elapsed = time.monotonic() - started
        progress = max(step / options.steps, elapsed / (60 * options.minutes))
        if step % 25 == 0:
            print(f"step {step} {elapsed:.0f} s answer {losses[0]:.4f} teacher {losses[1]:.3f}")
        if step % options.save_every == 0 or progress >= 1:
            save_checkpoint(model, options.output)
        if progress >= 1:
            return


def _start(
    options: TrainOptions, codec: Codec, rng: np.random.Generator
) -> Qwen3VLForConditionalGeneration:
    if options.init_from is not None:
        return Qwen3VLForConditionalGeneration.from_pretrained(
            options.init_from, dtype=torch.float32, local_files_only=True
        )
    pictures = [make_picture(family, rng) for family in FAMILIES for _ in range(80)]
    frames = [frame for p in pictures for frame in codec.row(p, p.questions[:1]).frames]
    return build_model(np.concatenate([frame.patches for frame in frames]), options.seed)


def _parts(
    codec: Codec, visual_ids: tuple[int, int], size: int, rng: np.random.Generator
) -> Iterator[list[tuple[Batch, Lessons]]]:
    """New pictures for each step, in two parts of short and long rows to save padding."""
    names, shares = list(_FAMILY_SHARE), list(_FAMILY_SHARE.values())
    while True:
        asked = []
        for family in rng.choice(names, size, p=shares):
            picture = make_picture(str(family), rng)
            chosen = rng.permutation(len(picture.questions))[:_MAX_QUESTIONS]
            row = codec.row(
                picture,
                [picture.questions[int(i)] for i in chosen],
                as_chat=bool(rng.random() < _CHAT_SHARE),
                nested=bool(rng.random() < _NESTED_SHARE),
            )
            asked.append((picture, row))
        asked.sort(key=lambda pair: len(pair[1].input_ids))
        parts = []
        for half in (asked[: size // 2], asked[size // 2 :]):
            pictures, rows = zip(*half, strict=True)
            parts.append((collate(rows, visual_ids), lessons(pictures, rows)))
        yield parts


def _step(
    model: Qwen3VLForConditionalGeneration,
    teacher: Teacher,
    optimizer: torch.optim.Optimizer,
    parts: list[tuple[Batch, Lessons]],
    teacher_weight: float,
) -> tuple[float, float]:
    """One update; gives the loss of the answers and of the teacher."""
    total_weight = sum(float(batch.weights.sum()) for batch, _ in parts)
    num_patches = sum(len(batch.pixels) for batch, _ in parts)
    answer_total, teacher_total = 0.0, 0.0
    optimizer.zero_grad()
    for batch, lesson in parts:
        features = encode(model, batch)
        logits, targets = answer_logits(model, batch, features)
        each = functional.cross_entropy(logits, targets, reduction="none")
        answer_loss = each @ batch.weights[batch.labels != IGNORED] / total_weight
        teacher_loss = teacher(features, lesson) * (len(batch.pixels) / num_patches)
        (answer_loss + teacher_weight * teacher_loss).backward()
        answer_total += answer_loss.item()
        teacher_total += teacher_loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return answer_total, teacher_total


def _decay(progress: float) -> float:
    """Cosine from 1 to the final share of the peak."""
    wave = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return _FINAL_RATE + (1 - _FINAL_RATE) * wave


def _optimizer(model: nn.Module, teacher: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    parameters = [p for module in (model, teacher) for p in module.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(0.9, 0.98),
    )


def _parse() -> TrainOptions:
    defaults = TrainOptions(Path())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--init-from", type=Path, help="continue from this checkpoint's weights")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="wall time limit")
    parser.add_argument("--pictures", type=int, default=defaults.pictures, help="a step")
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--warmup", type=int, default=defaults.warmup, help="steps")
    parser.add_argument("--teacher", type=float, default=defaults.teacher, help="first weight")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--save-every", type=int, default=defaults.save_every, help="steps")
    return TrainOptions(**vars(parser.parse_args()))


if __name__ == "__main__":
    train(_parse())
