from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3vl_runtime.timing import GenerationTiming, StageTimer

EXAMPLE = GenerationTiming(
    preprocess_ms=5.0,
    vision_ms=20.0,
    prefill_ms=60.0,
    ttft_ms=100.0,
    inter_token_ms=(10.0, 30.0),
    e2e_ms=140.0,
)


def clock_of(*times_s: float) -> Callable[[], float]:
    readings: Iterator[float] = iter(times_s)
    return lambda: next(readings)


def test_derived_values() -> None:
    assert EXAMPLE.output_tokens == 3
    assert EXAMPLE.tpot_ms == 20.0
    assert EXAMPLE.output_tokens_per_s == pytest.approx(3 / 0.140)


def test_one_token_has_no_time_per_output_token() -> None:
    timing = replace(EXAMPLE, inter_token_ms=(), e2e_ms=100.0)
    assert timing.tpot_ms is None
    assert timing.output_tokens_per_s == 10.0


def test_to_dict_is_json_with_units_in_its_names() -> None:
    loaded = json.loads(json.dumps(EXAMPLE.to_dict()))
    assert loaded == {
        "preprocess_ms": 5.0,
        "vision_ms": 20.0,
        "prefill_ms": 60.0,
        "ttft_ms": 100.0,
        "inter_token_ms": [10.0, 30.0],
        "e2e_ms": 140.0,
        "output_tokens": 3,
        "tpot_ms": 20.0,
        "output_tokens_per_s": EXAMPLE.output_tokens_per_s,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"vision_ms": -1.0},
        {"ttft_ms": float("nan")},
        {"inter_token_ms": (10.0, -5.0)},
        {"e2e_ms": 50.0},
        {"e2e_ms": 0.0, "ttft_ms": 0.0},
    ],
)
def test_impossible_times_are_caught(changes: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        replace(EXAMPLE, **changes)


def test_timer_counts_from_its_creation() -> None:
    #                start  preprocess  vision twice           prefill     tokens
    clock = clock_of(100.0, 101.0, 103.0, 103.0, 104.0, 105.0, 107.0, 108.0, 112.0, 113.0, 115.0)
    timer = StageTimer(clock)
    with timer.stage("preprocess"):
        pass
    for _ in range(2):
        with timer.stage("vision"):
            pass
    with timer.stage("prefill"):
        pass
    timer.token()
    timer.token()
    assert timer.finish() == GenerationTiming(
        preprocess_ms=2000.0,
        vision_ms=3000.0,
        prefill_ms=4000.0,
        ttft_ms=13000.0,
        inter_token_ms=(2000.0,),
        e2e_ms=15000.0,
    )


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=30))
def test_gaps_add_up_to_the_whole(gaps_s: list[float]) -> None:
    now = 0.0

    def clock() -> float:
        return now

    timer = StageTimer(clock)
    for gap_s in gaps_s:
        now += gap_s
        timer.token()
    timing = timer.finish()
    assert timing.output_tokens == len(gaps_s)
    assert timing.ttft_ms == pytest.approx(1000 * gaps_s[0])
    assert timing.inter_token_ms == pytest.approx(tuple(1000 * gap for gap in gaps_s[1:]), rel=1e-6)
    assert timing.ttft_ms + sum(timing.inter_token_ms) == pytest.approx(timing.e2e_ms)
    if len(gaps_s) > 1:
        mean_ms = sum(timing.inter_token_ms) / len(timing.inter_token_ms)
        assert timing.tpot_ms == pytest.approx(mean_ms)


def test_real_clock_measures_real_time() -> None:
    timer = StageTimer()
    with timer.stage("prefill"):
        time.sleep(0.02)
    timer.token()
    timing = timer.finish()
    assert 19.0 <= timing.prefill_ms <= timing.ttft_ms == timing.e2e_ms
    assert timing.vision_ms == timing.preprocess_ms == 0.0


def test_a_failing_stage_leaves_the_timer_usable() -> None:
    timer = StageTimer(clock_of(0.0, 1.0, 2.0, 2.0, 5.0, 6.0))
    with pytest.raises(OSError, match="broken"), timer.stage("vision"):
        raise OSError("broken")
    with timer.stage("vision"):
        pass
    timer.token()
    assert timer.finish().vision_ms == 4000.0


def test_misuse_is_caught() -> None:
    timer = StageTimer()
    with pytest.raises(AssertionError, match="at least one token"):
        timer.finish()
    with (
        pytest.raises(AssertionError, match="inside stage"),
        timer.stage("vision"),
        timer.stage("prefill"),
    ):
        pass
    with pytest.raises(AssertionError, match="found 'decode'"), timer.stage("decode"):
        pass
