from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, GenerationMixin, Qwen3VLConfig
from transformers.generation import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from qwen3vl_export.errors import CheckpointError, ContractError, InputError
from qwen3vl_runtime.sampling import Sampler, token_distribution
from qwen3vl_runtime.sampling_params import GenerationDefaults, ResolvedSampling, SamplingParams

NEUTRAL = GenerationDefaults()
QWEN3_VL = {
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "top_k": 20,
    "top_p": 0.8,
    "repetition_penalty": 1.0,
    "temperature": 0.7,
    "transformers_version": "4.57.0.dev0",
}


class _Reference(GenerationMixin):
    """Lends transformers' own choice and order of processors, without a model."""

    config = Qwen3VLConfig()


def reference_processors(**generation_settings: Any) -> LogitsProcessorList:
    return _Reference()._get_logits_processor(
        GenerationConfig(do_sample=True, **generation_settings), input_ids_seq_length=1
    )


def reference_distribution(
    logits: np.ndarray, history: list[int], dtype: torch.dtype, **generation_settings: Any
) -> np.ndarray:
    """Probabilities [vocab]; the penalty runs in float32, as it does in generation."""
    input_ids = torch.tensor([history], dtype=torch.int64)
    scores = torch.from_numpy(logits.copy())[None]
    for processor in reference_processors(**generation_settings):
        if not isinstance(processor, RepetitionPenaltyLogitsProcessor):
            scores = scores.to(dtype)
        scores = processor(input_ids, scores)
    return scores.to(dtype).softmax(-1)[0].numpy()


def our_distribution(
    logits: np.ndarray, history: list[int], **sampling: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Kept token ids and probabilities [vocab]."""
    resolved = SamplingParams(do_sample=True, seed=0, **sampling).resolve(NEUTRAL)
    scores = Sampler(resolved, history)._penalise(logits)
    token_ids, probabilities = token_distribution(scores, resolved)
    assert np.all(np.diff(token_ids) > 0)
    assert np.isfinite(scores[token_ids]).all()
    dense = np.zeros(logits.size)
    dense[token_ids] = probabilities
    return token_ids, dense


def by_score(scores: np.ndarray, probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Kept scores in ascending order and the probability of each; leaves out underflow."""
    kept = np.flatnonzero(probabilities > 1e-290)
    order = kept[np.lexsort((probabilities[kept], scores[kept]))]
    return scores[order], probabilities[order]


def draws(params: SamplingParams, logits: np.ndarray, count: int) -> list[int]:
    sampler = Sampler(params.resolve(NEUTRAL), [])
    return [sampler.sample(logits) for _ in range(count)]


# Coarse values make ties, which decide who stays at the borders of top-k and top-p.
scores_strategy = st.lists(
    st.one_of(
        st.integers(-24, 24).map(lambda n: n / 4),
        st.floats(-30, 30, width=32),
        st.just(-np.inf),
    ),
    min_size=3,
    max_size=60,
).map(lambda values: np.array(values, dtype=np.float32))


@settings(max_examples=300, deadline=None)
@given(
    logits=scores_strategy,
    history=st.lists(st.integers(0, 20) | st.integers(0, 70), min_size=1, max_size=12),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 1.5, 10.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 20, 500]),
    top_p=st.sampled_from([0.01, 0.35, 0.8, 0.95, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 0.97]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.05, 2.0]),
)
def test_distribution_equals_transformers(
    logits: np.ndarray,
    history: list[int],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
) -> None:
    assume(np.isfinite(logits).any())
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "repetition_penalty": repetition_penalty,
    }
    # The two implementations may round a sum differently by one bit, so leave out the cases in
    # which a token lies on a border.
    before = np.sort(reference_distribution(logits, history, torch.float64, **options))
    assume(top_p == 1 or np.abs(np.cumsum(before) - (1 - top_p)).min() > 1e-9)
    options["top_p"] = top_p
    before = reference_distribution(logits, history, torch.float64, **options)
    assume(min_p == 0 or np.abs(before - min_p * before.max()).min() > 1e-9)
    options["min_p"] = min_p

    expected = reference_distribution(logits, history, torch.float64, **options)
    _, found = our_distribution(logits, history, **options)
    # Which of equal scores stay at the border of top-p depends on torch.sort, so ids may differ
    # there: compare the kept scores and the probability that each has.
    scores = RepetitionPenaltyLogitsProcessor(repetition_penalty)(
        torch.tensor([history]), torch.from_numpy(logits)[None]
    )[0].numpy()
    expected_kept, found_kept = by_score(scores, expected), by_score(scores, found)
    np.testing.assert_array_equal(found_kept[0], expected_kept[0])
    np.testing.assert_allclose(found_kept[1], expected_kept[1], rtol=1e-11)
    if np.unique(scores[np.isfinite(scores)]).size == np.isfinite(scores).sum():
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-290)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 1.0, "top_p": 0.1},
        {"temperature": 2.0, "min_p": 0.02},
        {"temperature": 0.3, "top_k": 1000, "top_p": 0.9, "min_p": 0.001},
        {"temperature": 1.0},
    ],
)
@pytest.mark.parametrize("peak", [0.0, 12.0])
def test_distribution_of_a_full_vocabulary(options: dict[str, float], peak: float) -> None:
    rng = np.random.default_rng(5)
    logits = (3 * rng.standard_normal(151936)).astype(np.float32)
    logits[rng.integers(0, logits.size, 10)] += peak
    history = [int(token) for token in rng.integers(0, logits.size, 50)]
    options = {**options, "repetition_penalty": 1.1}
    token_ids, found = our_distribution(logits, history, **options)

    exact = reference_distribution(logits, history, torch.float64, **options)
    np.testing.assert_array_equal(token_ids, np.flatnonzero(exact))
    np.testing.assert_allclose(found, exact, rtol=1e-9)
    # What transformers computes in practice is this, up to float32 rounding.
    rounded = reference_distribution(logits, history, torch.float32, **options)
    assert np.abs(found - rounded).sum() / 2 < 1e-4


def test_min_p_of_one_keeps_the_most_likely_tokens() -> None:
    logits = np.array([1.0, 2.0, 0.0, 2.0], dtype=np.float32)
    expected = reference_distribution(logits, [0], torch.float64, min_p=1.0)
    _, found = our_distribution(logits, [0], min_p=1.0)
    np.testing.assert_array_equal(found, expected)
    assert list(found) == [0, 0.5, 0, 0.5]


def test_the_most_likely_token_always_stays() -> None:
    logits = np.array([0.0, 5.0, 4.9], dtype=np.float32)
    for options in ({"top_p": 1e-30}, {"top_k": 1}, {"min_p": 1.0}):
        assert list(our_distribution(logits, [0], **options)[1]) == [0, 1, 0]
    # Here the sum of all probabilities is not above 1 - top_p, which rounds to 1.
    assert list(our_distribution(np.zeros(2, np.float32), [0], top_p=1e-30)[1]) == [1, 0]


@pytest.mark.parametrize("count", [4, 100])
def test_of_equal_scores_at_the_nucleus_border_the_first_stay(count: int) -> None:
    logits = np.zeros(count, dtype=np.float32)
    expected = reference_distribution(logits, [0], torch.float64, top_p=0.305)
    token_ids, found = our_distribution(logits, [0], top_p=0.305)
    np.testing.assert_allclose(np.sort(found), np.sort(expected))
    np.testing.assert_array_equal(token_ids, np.arange(np.count_nonzero(expected)))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    penalty=st.sampled_from([0.5, 1.0, 1.1, 1.5]),
    prompt=st.lists(st.integers(0, 15), max_size=8),
)
def test_greedy_with_penalty_follows_transformers(
    seed: int, penalty: float, prompt: list[int]
) -> None:
    """Step by step, so that tokens generated earlier are penalised too."""
    rng = np.random.default_rng(seed)
    # Close values, so that the penalty often changes the winner.
    steps = (rng.integers(-8, 9, size=(12, 10)) / 8).astype(np.float32)
    resolved = SamplingParams(repetition_penalty=penalty).resolve(NEUTRAL)
    sampler = Sampler(resolved, prompt)
    found = [sampler.sample(logits) for logits in steps]

    processor = RepetitionPenaltyLogitsProcessor(penalty)
    history, expected = list(prompt), []
    for logits in steps:
        scores = torch.from_numpy(logits)[None]
        if history:
            scores = processor(torch.tensor([history]), scores)
        expected.append(int(scores.argmax(-1)))
        history.append(expected[-1])
    assert found == expected


def test_greedy_takes_the_first_of_equal_tokens() -> None:
    logits = np.array([0, 3, 1, 3, 3], dtype=np.float32)
    assert draws(SamplingParams(), logits, 1) == [1] == [int(torch.from_numpy(logits).argmax())]


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([1, 2, 3, 4, 10, 20, 25, 35], dtype=np.float32))
    expected = 20_000 * np.array([1, 2, 3, 4, 10, 20, 25, 35]) / 100
    found = np.bincount(draws(SamplingParams(temperature=1.0, seed=7), logits, 20_000), minlength=8)
    chi_square = float(((found - expected) ** 2 / expected).sum())
    assert chi_square < 24.3  # 99.9 % of the chi-square distribution with 7 degrees of freedom
    assert chi_square > 0.0  # the draws are random, not the expectation itself


def test_removed_tokens_are_never_drawn() -> None:
    logits = np.array([1.0, -np.inf, 1.0, 0.9, -5.0, -np.inf], dtype=np.float32)
    assert set(draws(SamplingParams(top_k=2, seed=1), logits, 300)) == {0, 2}
    assert set(draws(SamplingParams(temperature=1e6, seed=1), logits, 500)) == {0, 2, 3, 4}


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e300])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = np.array([-3e38, 0.0, 3e38], dtype=np.float32)
    resolved = SamplingParams(temperature=temperature).resolve(NEUTRAL)
    _, probabilities = token_distribution(logits, resolved)
    expected = [0, 0, 1] if temperature < 1 else [1 / 3] * 3
    np.testing.assert_allclose(probabilities, expected)


def test_a_seed_fixes_the_tokens() -> None:
    logits = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=11)
    first = draws(params, logits, 30)
    assert first == draws(params, logits, 30)
    assert first != draws(SamplingParams(temperature=1.0, seed=12), logits, 30)
    # Another sequence that draws in between changes nothing.
    sampler, other = (Sampler(params.resolve(NEUTRAL), []) for _ in range(2))
    interleaved = []
    for _ in range(30):
        other.sample(logits)
        interleaved.append(sampler.sample(logits))
    assert interleaved == first


def test_a_seed_that_was_picked_can_be_reused() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    picked = SamplingParams(temperature=1.0).resolve(NEUTRAL)
    again = SamplingParams(temperature=1.0, seed=picked.seed).resolve(NEUTRAL)
    assert again == picked
    first, second = (Sampler(resolved, []) for resolved in (picked, again))
    assert [first.sample(logits) for _ in range(9)] == [second.sample(logits) for _ in range(9)]
    assert SamplingParams(temperature=1.0).resolve(NEUTRAL).seed != picked.seed


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 3, "top_p": 0.9}])
def test_logits_are_not_modified(sampling: dict[str, Any]) -> None:
    logits = np.arange(20, dtype=np.float32)
    logits.flags.writeable = False
    params = SamplingParams(repetition_penalty=1.3, seed=0, **sampling)
    Sampler(params.resolve(NEUTRAL), [1, 19]).sample(logits)
    np.testing.assert_array_equal(logits, np.arange(20))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"top_k": 2}, {"top_p": 0.5}])
@pytest.mark.parametrize("penalty", [1.0, 1.2])
@pytest.mark.parametrize(
    "bad",
    [
        [0.0, 9.0, np.nan, 1.0],
        [np.nan, 9.0, np.inf, 1.0],
        [0.0, np.inf, 1.0, 2.0],
        [-np.inf] * 4,
        [np.nan] * 4,
    ],
)
def test_broken_logits_are_refused(
    sampling: dict[str, Any], penalty: float, bad: list[float]
) -> None:
    resolved = SamplingParams(repetition_penalty=penalty, **sampling).resolve(NEUTRAL)
    with pytest.raises(ContractError, match=r"decoder returned .*(nan|inf).*check the images"):
        Sampler(resolved, [0, 1]).sample(np.array(bad, dtype=np.float32))


@pytest.mark.parametrize(
    "logits",
    [np.zeros((1, 4), np.float32), np.zeros(4), np.zeros(4, np.float16), np.zeros(0, np.float32)],
)
def test_logits_of_another_shape_or_type_are_refused(logits: np.ndarray) -> None:
    with pytest.raises(ContractError, match=r"must be float32 \[vocab\], found float"):
        Sampler(SamplingParams().resolve(NEUTRAL), []).sample(logits)


@pytest.mark.parametrize("prompt", [[-1], [[1, 2]], [0.5], ["a"], np.zeros((2, 2), np.int64)])
def test_prompts_that_are_not_token_ids_are_refused(prompt: Any) -> None:
    with pytest.raises(InputError, match="prompt_token_ids"):
        Sampler(SamplingParams().resolve(NEUTRAL), prompt)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_new_tokens", [0, -1, 1.0, True, None, "5"]),
        ("temperature", [-0.1, float("nan"), float("inf"), "0.7", True]),
        ("top_k", [-1, 1.5, True, float("nan")]),
        ("top_p", [0, 0.0, -0.5, 1.01, float("nan"), "0.9", False]),
        ("min_p", [-0.1, 1.1, float("nan")]),
        ("repetition_penalty", [0, -1.0, float("nan"), float("inf"), 1e9]),
        ("seed", [-1, 1.0, True, "1"]),
        ("do_sample", [0, 1, "yes", 1.0]),
        ("ignore_eos", [0, None, "no"]),
        ("stop", ["END", [""], ("a", ""), [1], None, {"a"}]),
        ("stop_token_ids", [5, [-1], [1.0], [True], ["1"], None]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InputError, match=rf"^{name} must .*found"):
            SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "sampling",
    [
        {"do_sample": True, "temperature": 0},
        {"do_sample": False, "temperature": 0.7},
        {"do_sample": False, "top_k": 5},
        {"do_sample": False, "top_p": 0.5},
        {"do_sample": False, "min_p": 0.5},
        {"temperature": 0, "top_k": 5},
        {"temperature": 0.0, "top_p": 0.9},
        {"temperature": 0, "min_p": 0.5},
    ],
)
def test_contradictions_are_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="contradicts"):
        SamplingParams(**sampling)


@pytest.mark.parametrize(
    ("sampling", "from_greedy", "from_sampling"),
    [
        ({}, False, True),
        ({"temperature": 0}, False, False),
        ({"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, False, False),
        ({"temperature": 0.7}, True, True),
        ({"temperature": 1.0}, True, True),
        ({"top_k": 5}, True, True),
        ({"top_p": 0.9}, True, True),
        ({"min_p": 0.1}, True, True),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, False, True),
        ({"repetition_penalty": 1.2, "seed": 3}, False, True),
        ({"do_sample": True}, True, True),
        ({"do_sample": False}, False, False),
        ({"do_sample": False, "temperature": 1.0, "top_p": 1.0}, False, False),
    ],
)
def test_when_sampling_is_on(
    sampling: dict[str, Any], from_greedy: bool, from_sampling: bool
) -> None:
    params = SamplingParams(**sampling)
    assert params.resolve(NEUTRAL).do_sample is from_greedy
    assert params.resolve(GenerationDefaults.from_dict(QWEN3_VL)).do_sample is from_sampling


def test_resolve_takes_open_values_from_the_checkpoint() -> None:
    defaults = GenerationDefaults.from_dict({**QWEN3_VL, "repetition_penalty": 1.5})
    params = SamplingParams(
        temperature=np.float32(0.5), seed=4, stop=["a"], stop_token_ids=(7, 151643)
    )
    assert params.resolve(defaults) == ResolvedSampling(
        max_new_tokens=SamplingParams.max_new_tokens,
        do_sample=True,
        temperature=0.5,
        top_k=20,
        top_p=0.8,
        min_p=0.0,
        repetition_penalty=1.5,
        seed=4,
        stop=("a",),
        stop_token_ids=(151645, 151643, 7),
    )
    greedy = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(7,)).resolve(defaults)
    assert (greedy.temperature, greedy.top_k, greedy.top_p, greedy.min_p) == (1.0, 0, 1.0, 0.0)
    assert greedy.repetition_penalty == 1.5
    assert greedy.stop_token_ids == (7,)


def test_a_checkpoint_temperature_of_zero_is_no_temperature_to_sample_with() -> None:
    defaults = GenerationDefaults.from_dict({"temperature": 0})
    assert SamplingParams().resolve(defaults).do_sample is False
    assert SamplingParams(temperature=0.5).resolve(defaults).temperature == 0.5
    for params in (SamplingParams(do_sample=True), SamplingParams(top_p=0.5)):
        with pytest.raises(InputError, match="temperature > 0"):
            params.resolve(defaults)


def test_generation_config_of_the_published_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    assert GenerationDefaults.from_dict(QWEN3_VL) == GenerationDefaults(
        do_sample=True,
        temperature=0.7,
        top_k=20,
        top_p=0.8,
        repetition_penalty=1.0,
        eos_token_ids=(151645, 151643),
        pad_token_id=151643,
        bos_token_id=151643,
    )
    assert not caplog.records


def test_generation_config_with_one_eos_and_nulls(caplog: pytest.LogCaptureFixture) -> None:
    config = {"eos_token_id": 412, "top_k": None, "pad_token_id": None, "num_beams": None}
    assert GenerationDefaults.from_dict(config) == GenerationDefaults(eos_token_ids=(412,))
    assert GenerationDefaults.from_dict({}) == NEUTRAL
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("do_sample", 1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_k", -5),
        ("top_p", 0.0),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, -2]),
        ("pad_token_id", -1),
        ("bos_token_id", 1.0),
    ],
)
def test_a_broken_generation_config_is_refused(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name} must be .*found"):
        GenerationDefaults.from_dict({name: value})


def test_transformers_defaults_raise_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    spelled_out = GenerationConfig(**GenerationConfig._get_default_generation_params())
    GenerationDefaults.from_dict(GenerationConfig().to_dict())
    defaults = GenerationDefaults.from_dict(spelled_out.to_dict())
    assert defaults == GenerationDefaults(top_k=50)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("penalty_alpha", 0.6),
        ("no_repeat_ngram_size", 3),
        ("suppress_tokens", [1]),
        ("forced_eos_token_id", 0),
        ("renormalize_logits", True),
        ("typical_p", 0.9),
        ("stop_strings", ["a"]),
        ("a_setting_of_tomorrow", 3),
    ],
)
def test_unsupported_settings_are_named_in_a_warning(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="qwen3vl_runtime.sampling_params"):
        defaults = GenerationDefaults.from_dict({name: value, "top_p": 0.5})
    assert defaults == GenerationDefaults(top_p=0.5)
    assert [f"{name}={value!r}" in record.getMessage() for record in caplog.records] == [True]
