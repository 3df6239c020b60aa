"""Neither the company in a batch nor the chunks of a prefill may change an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.parity.conversations import CONVERSATIONS, conversations, image, user, varied
from tests.parity.logits import decode_logits, largest_difference, random_answer
from tests.shapes import RANDOM_SHAPES
from tests.tolerances import LOGITS

from qwen3vl_export.errors import InputError
from qwen3vl_runtime import ORTRunner, SamplingParams
from qwen3vl_tools.reference import Reference

Runners = Callable[..., ORTRunner]
References = Callable[[str], Reference]

SHAPES = ("trained", *RANDOM_SHAPES)
ENDLESS = varied(48)
BATCHES = {
    "text beside images": ("text", "wide, tall and square image", "one image"),
    "four kinds": ("video of odd length", "text", "turns with images and a video", "one image"),
    "text only": ("text", "text"),
    "shorter last": ("turns with images and a video", "two equal sizes around another", "text"),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", SHAPES)
def test_a_batch_gives_each_prompt_its_own_answer(name: str, batch: str, runner: Runners) -> None:
    prompts = [CONVERSATIONS[key] for key in BATCHES[batch]]
    together = runner(name).generate_batch(prompts, ENDLESS)
    for messages, result in zip(prompts, together, strict=True):
        alone = runner(name).generate(messages, ENDLESS)
        assert result.token_ids == alone.token_ids
        assert (result.text, result.prompt_tokens) == (alone.text, alone.prompt_tokens)


@pytest.mark.parametrize("name", ["trained", "tied"])
def test_rows_end_at_different_times(name: str, runner: Runners) -> None:
    prompts = [CONVERSATIONS[key] for key in BATCHES["four kinds"]]
    free = [runner(name).generate(messages, ENDLESS) for messages in prompts]
    params = [
        varied(1),
        varied(48),
        replace(varied(48), stop_token_ids=(free[2].token_ids[10],)),
        varied(23),
    ]
    results = runner(name).generate_batch(prompts, params)
    stop = free[2].token_ids.index(free[2].token_ids[10]) + 1
    for result, whole, length in zip(results, free, (1, 48, stop, 23), strict=True):
        assert result.token_ids == whole.token_ids[:length]
        assert len(result.timing.inter_token_ms) == length - 1
    assert [result.finish_reason for result in results] == ["length", "length", "stop", "length"]


@pytest.mark.parametrize("name", ["trained", "tied"])
def test_seeded_draws_in_a_batch_equal_those_alone(name: str, runner: Runners) -> None:
    prompts = [CONVERSATIONS[key] for key in BATCHES["four kinds"]]
    params = [
        SamplingParams(max_new_tokens=24, temperature=1.5, seed=4, ignore_eos=True),
        SamplingParams(max_new_tokens=32, temperature=0.8, top_p=0.9, seed=4, ignore_eos=True),
        SamplingParams(max_new_tokens=16, temperature=0, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_new_tokens=24, temperature=3.0, top_k=40, seed=5, ignore_eos=True),
    ]
    together = runner(name).generate_batch(prompts, params)
    for messages, each, result in zip(prompts, params, together, strict=True):
        assert result.token_ids == runner(name).generate(messages, each).token_ids


@pytest.mark.parametrize("chunk", [1, 3, 16, 47, 48, 49, 93, 94, 95])
@pytest.mark.parametrize("name", ["trained", "tied", "one-layer"])
def test_a_prefill_in_chunks_gives_the_same_logits_and_tokens(
    name: str, chunk: int, runner: Runners, bundle: Callable[..., Path]
) -> None:
    """The two longer prompts of the batch have 48 and 94 tokens in most shapes."""
    prompts = [CONVERSATIONS[key] for key in BATCHES["four kinds"]]
    prepared = [runner(name).preprocessor.prepare(messages) for messages in prompts]
    answers = np.array([random_answer(seed, steps=2) for seed in range(len(prompts))])
    whole = decode_logits(runner(name), prepared, answers, chunk=4096)
    parts = decode_logits(runner(name), prepared, answers, chunk=chunk)
    assert largest_difference(parts, whole) < LOGITS["fp32"]
    chunked = ORTRunner(bundle(name), threads=1, prefill_chunk=chunk, verify_hashes=False)
    expected = [each.token_ids for each in runner(name).generate_batch(prompts, ENDLESS)]
    assert [each.token_ids for each in chunked.generate_batch(prompts, ENDLESS)] == expected


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(tuple(RANDOM_SHAPES)),  # See `tests/tolerances.py` on "trained".
    batch=st.lists(conversations(), min_size=2, max_size=4),
    chunk=st.integers(1, 60) | st.integers(1, 2000),
)
def test_any_batch_in_any_chunks_against_transformers(
    name: str,
    batch: list[list[dict[str, Any]]],
    chunk: int,
    runner: Runners,
    reference: References,
) -> None:
    prompts = [runner(name).preprocessor.prepare(messages) for messages in batch]
    answers = np.array([random_answer(seed, steps=2) for seed in range(len(batch))])
    actual = decode_logits(runner(name), prompts, answers, chunk)
    for row, messages in enumerate(batch):
        expected = reference(name).logits(messages, answers[row].tolist()).numpy()[-3:]
        assert largest_difference(actual[row], expected) < LOGITS["fp32"]


def test_visuals_of_equal_size_in_different_prompts_share_a_call(
    runner: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And still each prompt gets its own pictures."""
    runtime = runner("tied")
    prompts = [
        user(image(80), image(81, 64, 128), "Which?"),
        user(image(82, 64, 128), "What?"),
        user(image(83), image(84), "Compare."),
    ]
    expected = [runtime.generate(messages, ENDLESS).token_ids for messages in prompts]
    assert len(set(expected)) == len(prompts)
    calls = []
    run = runtime.vision._session.run

    def count(feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        calls.append(len(feed["pixel_values"]))
        return run(feed)

    monkeypatch.setattr(runtime.vision._session, "run", count)
    results = runtime.generate_batch(prompts, ENDLESS)
    assert [result.token_ids for result in results] == expected
    assert sorted(calls) == [2, 3]


def test_batches_beyond_the_limits_are_refused(runner: Runners) -> None:
    messages = CONVERSATIONS["text"]
    with pytest.raises(InputError, match=r"1 to 4 conversations \(max_batch\), found 5"):
        runner("tied").generate_batch([messages] * 5)
    with pytest.raises(InputError, match="found 0"):
        runner("tied").generate_batch([])
    with pytest.raises(InputError, match="2, one each, found 3"):
        runner("tied").generate_batch([messages] * 2, [SamplingParams()] * 3)
