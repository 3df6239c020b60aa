"""Logits and visual features against transformers, on every shape of model.

A wrong weight, position, mask or merge changes logits far beyond the rounding that the tolerances
allow for; comparing numbers finds it where greedy tokens may still agree by luck.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.parity.conversations import CONVERSATIONS, conversations
from tests.parity.logits import (
    decode_logits,
    largest_difference,
    prompt_logits,
    random_answer,
    score,
)
from tests.parity.reference import visual_features
from tests.shapes import RANDOM_SHAPES
from tests.tolerances import LOGITS, LOGITS_RMS, LOGITS_STD, VISION

from qwen3vl_runtime import ORTRunner
from qwen3vl_runtime.positions import decode_position_ids
from qwen3vl_runtime.text_model import DecoderCall
from qwen3vl_tools.reference import Reference

Runners = Callable[..., ORTRunner]
References = Callable[[str], Reference]

SHAPES = ("trained", *RANDOM_SHAPES)
#: Each fp16 bundle is one more export; these two hold every feature.
FP16_SHAPES = ("trained", "four-levels")
STEPS = 32


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_position_of_a_prompt(
    name: str, conversation: str, runner: Runners, reference: References
) -> None:
    messages = CONVERSATIONS[conversation]
    prompt = runner(name).preprocessor.prepare(messages)
    actual = prompt_logits(runner(name), prompt)
    expected = reference(name).logits(messages).numpy()
    assert largest_difference(actual, expected) < LOGITS["fp32"]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_32_decode_steps_through_the_cache(
    name: str, conversation: str, runner: Runners, reference: References
) -> None:
    messages, answer = CONVERSATIONS[conversation], random_answer(seed=3, steps=STEPS)
    prompt = runner(name).preprocessor.prepare(messages)
    actual = decode_logits(runner(name), [prompt], np.array([answer]))[0]
    expected = reference(name).logits(messages, answer).numpy()[-STEPS - 1 :]
    assert largest_difference(actual, expected) < LOGITS["fp32"]


@pytest.mark.parametrize("name", SHAPES)
def test_several_tokens_in_one_call_after_the_prompt(
    name: str, runner: Runners, reference: References
) -> None:
    """Verifying a draft: eight tokens at once, each scored, see the cache and one another."""
    messages = CONVERSATIONS["turns with images and a video"]
    answer = random_answer(seed=4, steps=8)
    prompt = runner(name).preprocessor.prepare(messages)
    prompt_logits(runner(name), prompt)
    call = DecoderCall(
        input_ids=np.array([answer]),
        visual_indices=np.full((1, 8), -1, np.int64),
        position_ids=decode_position_ids([prompt.num_tokens], [prompt.rope.rope_delta], 8),
        write_indices=np.array([prompt.num_tokens]),
        logits_indices=np.arange(8)[None],
    )
    actual = runner(name).text.forward(call, runner(name).text.no_visuals)[0]
    expected = reference(name).logits(messages, answer).numpy()[-8:]
    assert largest_difference(actual, expected) < LOGITS["fp32"]


@pytest.mark.parametrize("name", ["tied", "one-layer"])
def test_positions_are_scored_in_the_order_asked(
    name: str, runner: Runners, reference: References
) -> None:
    messages = CONVERSATIONS["one image"]
    prompt = runner(name).preprocessor.prepare(messages)
    positions = np.array([prompt.num_tokens - 1, 0, 5, 5, 3])
    runner(name).text.begin(1, prompt.num_tokens)
    actual = score(runner(name), prompt, positions)
    expected = reference(name).logits(messages).numpy()[positions]
    assert largest_difference(actual, expected) < LOGITS["fp32"]


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(tuple(RANDOM_SHAPES)),  # See `tests/tolerances.py` on "trained".
    messages=conversations(),
    chunk=st.integers(1, 40) | st.integers(1, 2000),
    seed=st.integers(0, 99),
)
def test_any_conversation_in_chunks_of_any_size(
    name: str,
    messages: list[dict[str, Any]],
    chunk: int,
    seed: int,
    runner: Runners,
    reference: References,
) -> None:
    answer = random_answer(seed, steps=3)
    prompt = runner(name).preprocessor.prepare(messages)
    actual = decode_logits(runner(name), [prompt], np.array([answer]), chunk)[0]
    expected = reference(name).logits(messages, answer).numpy()[-4:]
    assert largest_difference(actual, expected) < LOGITS["fp32"]


@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, "fp32") for name in SHAPES] + [(name, "fp16") for name in FP16_SHAPES],
)
def test_visual_features_and_every_deepstack_level(
    name: str, precision: str, runner: Runners, reference: References
) -> None:
    runtime = runner(name, precision)
    for messages in CONVERSATIONS.values():
        visuals = runtime.preprocessor.prepare(messages).visuals
        encoded = runtime.vision.encode(visuals)
        for kind in ("image", "video"):
            actual = [
                features
                for features, visual in zip(encoded, visuals, strict=True)
                if (visual.timestamps is not None) == (kind == "video")
            ]
            expected = visual_features(reference(name), messages, kind)
            for ours, (embeds, deepstack) in zip(actual, expected, strict=True):
                tensors = zip((ours.embeds, *ours.deepstack), (embeds, *deepstack), strict=True)
                for tensor, wanted in tensors:
                    limit = VISION[precision] * float(np.abs(wanted).max())
                    assert largest_difference(tensor, wanted) < limit


@pytest.mark.parametrize("name", FP16_SHAPES)
def test_fp16_is_close_to_fp32_and_no_worse_than_transformers(
    name: str, runner: Runners, reference: References, checkpoint: Callable[[str], Path]
) -> None:
    half = Reference(checkpoint(name), torch.float16)
    answer = random_answer(seed=5, steps=STEPS)
    ours, theirs = [], []
    for messages in CONVERSATIONS.values():
        expected = reference(name).logits(messages, answer).numpy()
        prompt = runner(name, "fp16").preprocessor.prepare(messages)
        prefilled = prompt_logits(runner(name, "fp16"), prompt)
        decoded = decode_logits(runner(name, "fp16"), [prompt], np.array([answer]))[0]
        actual = np.concatenate([prefilled, decoded[1:]])  # [prompt + answer, vocab]
        ours.append(actual - expected)
        theirs.append(half.logits(messages, answer).numpy() - expected)
    scale = min(1.0, LOGITS_STD / float(expected.std()))
    difference, yardstick = scale * np.concatenate(ours), scale * np.concatenate(theirs)
    assert np.abs(difference).max() < LOGITS["fp16"]
    assert _rms(difference) < LOGITS_RMS["fp16"]
    # The root mean square, since whose largest difference is larger is a matter of luck.
    print(
        "FIG",
        name,
        np.abs(difference).max(),
        np.abs(yardstick).max(),
        _rms(difference),
        _rms(yardstick),
    )
    assert _rms(difference) <= _rms(yardstick)
    # A bundle of another precision must not pass for fp16 by accident.
    assert _rms(difference) > LOGITS["fp32"]


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values.astype(np.float64)).mean()))


@pytest.mark.parametrize("limit", [1, 600])  # One or two of the three frames of 16 patches.
@pytest.mark.parametrize("name", ["tied", "no-deepstack"])
def test_frames_split_over_vision_calls(
    name: str, limit: int, runner: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames do not see each other, so how many share a call must not matter."""
    model = runner(name).vision
    visuals = runner(name).preprocessor.prepare(CONVERSATIONS["video of odd length"]).visuals
    visuals += runner(name).preprocessor.prepare(CONVERSATIONS["one image"]).visuals
    whole = model.encode(visuals)
    monkeypatch.setattr("qwen3vl_runtime.vision_model._MAX_SCORES_PER_CALL", limit)
    for split, expected in zip(model.encode(visuals), whole, strict=True):
        pairs = zip(
            (split.embeds, *split.deepstack), (expected.embeds, *expected.deepstack), strict=True
        )
        for tensor, wanted in pairs:
            limit_of_tensor = VISION["fp32"] * float(np.abs(wanted).max())
            assert largest_difference(tensor, wanted) < limit_of_tensor
