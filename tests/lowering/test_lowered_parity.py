"""Lowered and quantised bundles answer as the canonical ones, and as transformers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.parity.conversations import CONVERSATIONS
from tests.parity.logits import decode_logits, largest_difference, prompt_logits, random_answer
from tests.shapes import RANDOM_SHAPES
from tests.tolerances import LOGITS

from qwen3vl_runtime import ORTRunner, SamplingParams
from qwen3vl_tools.reference import Reference
from qwen3vl_tools.tiny.accuracy import accuracy, held_out_all
from qwen3vl_tools.tiny.conversation import as_messages
from qwen3vl_tools.tiny.scenes import Sample

Runners = Callable[..., ORTRunner]
References = Callable[[str], Reference]

STEPS = 16
LOWERED = ("fp32", "ort-cpu")
QUANTISED = {
    "int8": ("int8", "ort-cpu"),
    "int8 prefill": ("int8", "ort-cpu", "int8"),
    "int4": ("int4", "ort-cpu"),
    "int4 prefill": ("int4", "ort-cpu", "int8"),
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", list(RANDOM_SHAPES))
def test_fp32_equals_transformers(
    name: str, conversation: str, runner: Runners, reference: References
) -> None:
    lowered, messages = runner(name, *LOWERED), CONVERSATIONS[conversation]
    prompt = lowered.preprocessor.prepare(messages)
    answer = random_answer(3, STEPS)
    expected = reference(name).logits(messages, answer).numpy()
    assert largest_difference(prompt_logits(lowered, prompt), expected[:-STEPS]) < LOGITS["fp32"]
    actual = decode_logits(lowered, [prompt], np.array([answer]))[0]
    assert largest_difference(actual, expected[-STEPS - 1 :]) < LOGITS["fp32"]


def test_batches_and_chunks(runner: Runners) -> None:
    """Rows do not see each other, and a chunk's border is not to be seen."""
    lowered = runner("tied", *LOWERED)
    prompts = [lowered.preprocessor.prepare(messages) for messages in CONVERSATIONS.values()][:3]
    answers = np.array([random_answer(seed, 4) for seed in range(len(prompts))])
    batched = decode_logits(lowered, prompts, answers)
    for row, prompt in enumerate(prompts):
        alone = decode_logits(lowered, [prompt], answers[row : row + 1], chunk=5)[0]
        assert largest_difference(batched[row], alone) < LOGITS["fp32"]


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_batches_and_chunks(precision: str, runner: Runners) -> None:
    """The same answers, batched or chunked.

    Answers, not logits: a product of many rows adds up in another order than one of few, and where
    that moves an activation across a rounding border, it moves by a whole step.
    """
    options = QUANTISED[precision]
    lowered = runner("trained", *options)
    samples = [sample for sample in held_out_all(1, seed=3) if sample.kind in ("color", "shape")]
    conversations = [as_messages(sample) for sample in samples]
    params = SamplingParams(max_new_tokens=16, temperature=0)
    alone = [lowered.generate(messages, params).text for messages in conversations]
    batched = [result.text for result in lowered.generate_batch(conversations, params)]
    chunked = ORTRunner(lowered.bundle, prefill_chunk=5, threads=1)
    assert batched == alone
    assert [chunked.generate(messages, params).text for messages in conversations] == alone


@pytest.mark.parametrize("precision", QUANTISED)
def test_quantised_accuracy(precision: str, runner: Runners) -> None:
    """int8 within 1 point, int4 within 3 points of fp32 on held-out questions."""
    samples = held_out_all(9, seed=20270301)
    right = {
        name: _right(runner("trained", *options), samples)
        for name, options in (("fp32", LOWERED), (precision, QUANTISED[precision]))
    }
    points = 100 * (right["fp32"] - right[precision]) / len(samples)
    assert points <= (1 if precision.startswith("int8") else 3)


def _right(lowered: ORTRunner, samples: list[Sample]) -> int:
    params = SamplingParams(max_new_tokens=48, temperature=0)
    counts = accuracy(lambda sample: lowered.generate(as_messages(sample), params).text, samples)
    return sum(right for right, _ in counts.values())
