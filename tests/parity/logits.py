"""Logits of a runner's graphs on given tokens: what `generate` computes, without sampling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.tolerances import LOGITS_STD

from qwen3vl_runtime import ORTRunner
from qwen3vl_runtime.generation import prefill
from qwen3vl_runtime.positions import batch_position_ids, decode_position_ids
from qwen3vl_runtime.preprocess import PreparedPrompt
from qwen3vl_runtime.text_model import DecoderCall
from qwen3vl_runtime.vision_model import EncodedVisuals

__all__ = ["decode_logits", "largest_difference", "prompt_logits", "random_answer", "score"]

#: Ordinary tokens of every test vocabulary; special ones come after these.
_TEXT_TOKENS = 400


def prompt_logits(
    runner: ORTRunner, prompt: PreparedPrompt, features: EncodedVisuals | None = None
) -> np.ndarray:
    """Logits [seq, vocab] of every position of a prompt, from one call; leaves it cached."""
    runner.text.begin(1, runner.capacity)
    return score(runner, prompt, np.arange(prompt.num_tokens), features)


def score(
    runner: ORTRunner,
    prompt: PreparedPrompt,
    positions: np.ndarray,
    features: EncodedVisuals | None = None,
) -> np.ndarray:
    """Logits [positions, vocab] of chosen positions of a prompt, in the order chosen."""
    call = DecoderCall(
        input_ids=prompt.layout.input_ids[None],
        visual_indices=prompt.layout.visual_indices[None],
        position_ids=batch_position_ids([prompt.rope]),
        write_indices=np.zeros(1, np.int64),
        logits_indices=positions[None],
    )
    features = runner.encode([prompt]) if features is None else features
    return runner.text.forward(call, features)[0].copy()


def decode_logits(
    runner: ORTRunner, prompts: Sequence[PreparedPrompt], answers: np.ndarray, chunk: int = 1024
) -> np.ndarray:
    """Logits [batch, 1 + steps, vocab]: after the prompt, then after each given token.

    Args:
        runner: Whose graphs to run.
        prompts: One a row.
        answers: Tokens to force, [batch, steps].
        chunk: Prompt tokens a call.
    """
    batch, steps = answers.shape
    lengths = np.array([prompt.num_tokens for prompt in prompts])
    deltas = np.array([prompt.rope.rope_delta for prompt in prompts])
    runner.text.begin(batch, int(lengths.max()) + steps)
    logits = [prefill(runner.text, prompts, runner.encode(prompts), chunk)]
    for step in range(steps):
        call = DecoderCall(
            input_ids=np.ascontiguousarray(answers[:, step : step + 1]),
            visual_indices=np.full((batch, 1), -1, np.int64),
            position_ids=decode_position_ids(lengths + step, deltas),
            write_indices=lengths + step,
            logits_indices=np.zeros((batch, 1), np.int64),
        )
        logits.append(runner.text.forward(call, runner.text.no_visuals)[:, 0].copy())
    return np.stack(logits, axis=1)


def random_answer(seed: int, steps: int) -> list[int]:
    """Ordinary text tokens, likely or not."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, _TEXT_TOKENS, steps)]


def largest_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference, scaled down where the logits are larger than the table's.

    NaN or another shape never passes for a small difference.
    """
    assert actual.shape == expected.shape
    difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max()
    scale = min(1.0, LOGITS_STD / float(expected.std()))
    return float(difference) * scale if np.isfinite(difference) else float("inf")
