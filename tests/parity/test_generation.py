"""Whole answers: the tokens of transformers, and what a runner promises around them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.parity.conversations import CONVERSATIONS, PENALTY, image, user, varied, video
from tests.parity.logits import decode_logits, random_answer
from tests.parity.reference import endless_answer, visual_features
from tests.shapes import RANDOM_SHAPES

from qwen3vl_export.errors import InputError
from qwen3vl_runtime import ORTRunner, SamplingParams
from qwen3vl_tools.reference import Reference

Runners = Callable[..., ORTRunner]
References = Callable[[str], Reference]

SHAPES = ("trained", *RANDOM_SHAPES)
STEPS = 64
ENDLESS = varied(STEPS)
DESCRIBE = user(image(50, 96, 96), "Describe the picture.")


@pytest.mark.parametrize("penalty", [1.0, PENALTY])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_64_greedy_tokens(
    name: str, conversation: str, penalty: float, runner: Runners, reference: References
) -> None:
    messages = CONVERSATIONS[conversation]
    result = runner(name).generate(messages, replace(ENDLESS, repetition_penalty=penalty))
    expected = endless_answer(reference(name), messages, STEPS, penalty)
    assert list(result.token_ids) == expected
    assert len(set(expected)) > (8 if penalty == PENALTY else 0)  # Else it compares little.
    assert result.finish_reason == "length"
    assert result.prompt_tokens == reference(name).inputs(messages)["input_ids"].shape[1]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_answers_end_where_those_of_transformers_end(
    conversation: str, runner: Runners, reference: References
) -> None:
    messages = CONVERSATIONS[conversation]
    result = runner("trained").generate(messages, SamplingParams(temperature=0))
    expected = reference("trained").generate(messages, max_new_tokens=128)
    assert list(result.token_ids) == expected
    assert result.finish_reason == ("length" if len(expected) == 128 else "stop")
    tokenizer = reference("trained").tokenizer
    assert result.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_some_answer_ends_by_itself(runner: Runners) -> None:
    """Else the test above would say nothing about the end of an answer."""
    result = runner("trained").generate(DESCRIBE, SamplingParams(temperature=0))
    assert result.finish_reason == "stop"
    endless = runner("trained").generate(DESCRIBE, SamplingParams(temperature=0, ignore_eos=True))
    assert len(endless.token_ids) > len(result.token_ids)
    assert endless.token_ids[: len(result.token_ids)] == result.token_ids


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_fp16_keeps_the_answers_of_the_trained_checkpoint(
    precision: str, runner: Runners, reference: References
) -> None:
    result = runner("trained", precision).generate(DESCRIBE, SamplingParams(temperature=0))
    assert list(result.token_ids) == reference("trained").generate(DESCRIBE, max_new_tokens=128)


@pytest.mark.parametrize("name", ["trained", "tied", "no-deepstack"])
def test_nothing_is_left_of_a_longer_request(
    name: str, runner: Runners, bundle: Callable[..., Path]
) -> None:
    long, short = CONVERSATIONS["turns with images and a video"], CONVERSATIONS["one image"]
    answer = np.array([random_answer(seed=6, steps=5)])
    used, fresh = runner(name), ORTRunner(bundle(name), threads=1, capacity=2048)
    used.generate_batch([long, long], ENDLESS)
    for messages in (short, CONVERSATIONS["text"]):
        logits = [
            decode_logits(each, [each.preprocessor.prepare(messages)], answer)
            for each in (used, fresh)
        ]
        assert np.array_equal(logits[0], logits[1])
        assert used.generate(messages, ENDLESS).token_ids == (
            fresh.generate(messages, ENDLESS).token_ids
        )


@pytest.mark.parametrize("name", ["trained", "tied"])
def test_a_seed_decides_the_draws(name: str, runner: Runners) -> None:
    messages = CONVERSATIONS["one image"]

    def draw(seed: int) -> tuple[int, ...]:
        params = SamplingParams(
            max_new_tokens=24, temperature=2.0, top_k=50, seed=seed, ignore_eos=True
        )
        return runner(name).generate(messages, params).token_ids

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) == 4


@pytest.mark.parametrize("conversation", ["text", "turns with images and a video"])
@pytest.mark.parametrize(
    "params",
    [
        ENDLESS,
        SamplingParams(max_new_tokens=30, temperature=1.5, seed=3, ignore_eos=True),
        SamplingParams(max_new_tokens=30, temperature=0, stop=("e", "qqq")),
        SamplingParams(max_new_tokens=1),
    ],
    ids=["greedy", "sampled", "stop strings", "one token"],
)
@pytest.mark.parametrize("name", ["trained", "tied"])
def test_a_stream_adds_up_to_the_answer(
    name: str, conversation: str, params: SamplingParams, runner: Runners
) -> None:
    messages = CONVERSATIONS[conversation]
    whole = runner(name).generate(messages, params)
    chunks = list(runner(name).stream(messages, params))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(chunk.token_id for chunk in chunks) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason
    assert [chunk.result is not None for chunk in chunks].index(True) == len(chunks) - 1
    result = chunks[-1].result
    assert result is not None
    assert (result.text, result.token_ids) == (whole.text, whole.token_ids)
    assert result.prompt_tokens == whole.prompt_tokens


def test_a_cancelled_stream_frees_the_runner(runner: Runners) -> None:
    messages = CONVERSATIONS["one image"]
    expected = runner("trained").generate(messages, ENDLESS).token_ids
    stream = runner("trained").stream(CONVERSATIONS["video of odd length"], ENDLESS)
    assert len(list(itertools.islice(stream, 3))) == 3
    with pytest.raises(InputError, match="answering another request"):
        runner("trained").generate(messages, ENDLESS)
    assert next(stream).finish_reason is None  # The refused request did not disturb it.
    stream.close()
    assert runner("trained").generate(messages, ENDLESS).token_ids == expected


def test_a_failed_request_frees_the_runner(runner: Runners) -> None:
    with pytest.raises(InputError):
        runner("trained").generate([{"role": "user", "content": []}])
    with pytest.raises(InputError):
        next(runner("trained").stream([{"role": "nobody", "content": "x"}]))
    assert runner("trained").generate(CONVERSATIONS["text"], ENDLESS).token_ids


@pytest.mark.parametrize("name", ["trained", "tied"])
def test_a_stop_string_ends_and_cuts_the_answer(name: str, runner: Runners) -> None:
    messages = CONVERSATIONS["one image"]
    free = runner(name).generate(messages, ENDLESS)
    middle = len(free.text) // 2
    stop = free.text[middle : middle + 3]
    result = runner(name).generate(messages, replace(ENDLESS, stop=(stop,)))
    assert result.text == free.text[: free.text.index(stop)]
    assert result.finish_reason == "stop"
    assert result.token_ids == free.token_ids[: len(result.token_ids)]
    assert len(result.token_ids) < STEPS


def test_a_stop_token_ends_the_answer_and_is_part_of_its_tokens(runner: Runners) -> None:
    messages = CONVERSATIONS["one image"]
    free = runner("tied").generate(messages, ENDLESS).token_ids
    token = free[STEPS // 2]
    result = runner("tied").generate(messages, replace(ENDLESS, stop_token_ids=(token,)))
    assert result.token_ids == free[: free.index(token) + 1]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_length_limit_is_exact(count: int, runner: Runners) -> None:
    result = runner("tied").generate(CONVERSATIONS["text"], varied(count))
    assert len(result.token_ids) == count
    assert result.finish_reason == "length"


@pytest.mark.parametrize("source", ["runtime", "transformers"])
@pytest.mark.parametrize("name", ["trained", "tied", "four-levels", "no-deepstack"])
def test_features_computed_earlier_replace_pixels(
    name: str, source: str, runner: Runners, reference: References
) -> None:
    messages = user(image(60, 120, 64), "then", video(61, 5), "and", image(70, 64, 64), "What?")
    visuals = runner(name).preprocessor.prepare(messages).visuals
    if source == "runtime":
        features = [(each.embeds, each.deepstack) for each in runner(name).vision.encode(visuals)]
    else:
        images = visual_features(reference(name), messages, "image")
        (clip,) = visual_features(reference(name), messages, "video")
        features = [images[0], clip, images[1]]
    joined = [np.concatenate([embeds, *levels], axis=1) for embeds, levels in features]
    grids = [visual.grid_thw for visual in visuals]
    first = {"type": "image", "image_embeds": joined[0], "image_grid_thw": grids[0]}
    second = {
        "type": "video",
        "video_embeds": joined[1],
        "video_grid_thw": grids[1],
        "timestamps": visuals[1].timestamps,
    }
    expected = runner(name).generate(messages, ENDLESS).token_ids
    # The last picture stays pixels: both kinds of source may meet in one prompt.
    mixed = user(first, "then", second, "and", image(70, 64, 64), "What?")
    assert runner(name).generate(mixed, ENDLESS).token_ids == expected


def test_features_of_another_width_are_refused(runner: Runners) -> None:
    part = {"type": "image", "image_embeds": np.zeros((4, 96)), "image_grid_thw": [1, 4, 4]}
    with pytest.raises(InputError, match=r"\[4, 384\].*found \[4, 96\]"):
        runner("tied").generate(user(part, "What?"))


def test_a_request_beyond_the_capacity_is_refused_before_any_graph_runs(
    bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = CONVERSATIONS["one image"]  # 26 tokens
    small = ORTRunner(bundle("trained"), threads=1, capacity=90)

    def run(*args: Any) -> None:
        raise AssertionError("a graph ran")

    for session in (small.vision._session, small.text._sessions.embedding):
        monkeypatch.setattr(session, "run", run)
    with pytest.raises(InputError, match=r"26 tokens and max_new_tokens 65 need 91 .* is 90"):
        small.generate(messages, SamplingParams(max_new_tokens=65))
    with pytest.raises(InputError, match="the capacity is 90"):
        small.generate_batch([CONVERSATIONS["text"], messages], SamplingParams(max_new_tokens=65))
    with pytest.raises(AssertionError, match="a graph ran"):
        small.generate(messages, SamplingParams(max_new_tokens=64))


@pytest.mark.parametrize("name", ["trained", "tied"])
def test_a_request_that_just_fits(name: str, runner: Runners, bundle: Callable[..., Path]) -> None:
    messages = CONVERSATIONS["one image"]
    expected = runner(name).generate(messages, ENDLESS)
    tight = ORTRunner(bundle(name), threads=1, capacity=expected.prompt_tokens + STEPS)
    assert tight.generate(messages, ENDLESS).token_ids == expected.token_ids
    # In a batch, the row that has finished runs on at its last slot.
    short, full = tight.generate_batch([messages, messages], [varied(9), ENDLESS])
    assert full.token_ids == expected.token_ids
    assert short.token_ids == expected.token_ids[:9]


@pytest.mark.parametrize("conversation", ["text", "turns with images and a video"])
def test_timing_accounts_for_every_stage_and_token(conversation: str, runner: Runners) -> None:
    result = runner("trained").generate(CONVERSATIONS[conversation], ENDLESS)
    timing = result.timing
    assert len(timing.inter_token_ms) == len(result.token_ids) - 1
    assert timing.preprocess_ms > 0
    assert timing.prefill_ms > 0
    stages = timing.preprocess_ms + timing.vision_ms + timing.prefill_ms
    assert timing.ttft_ms >= stages
    assert timing.e2e_ms == pytest.approx(timing.ttft_ms + sum(timing.inter_token_ms))
    assert min(timing.inter_token_ms) > 0
    if conversation == "text":
        # Nothing to encode: no vision graph ran, which would take longer than one decoder step.
        assert timing.vision_ms < min(timing.inter_token_ms)
    else:
        assert timing.vision_ms > 0
