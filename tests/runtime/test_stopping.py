from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, StopStringCriteria

from qwen3vl_export.errors import InputError
from qwen3vl_runtime.stopping import StopChecker, StopState

CHECKPOINT = Path(__file__).parents[2] / "tools/qwen3vl_tools/tiny/checkpoint"

# Two letters only, so that stop strings overlap, contain and almost match each other.
texts = st.text(alphabet="ab", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3)


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Answer and stop string, read off the definition: the shortest text that ends with a stop."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


def certain_part(text: str, stops: list[str]) -> str:
    """What is certain of an unfinished text: all but an end with which a stop string begins."""
    for border in range(len(text)):
        if any(stop.startswith(text[border:]) for stop in stops):
            return text[:border]
    return text


def cut(text: str, borders: list[int]) -> list[str]:
    edges = [0, *sorted(min(border, len(text)) for border in borders), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=500, deadline=None)
@given(texts, stop_lists, st.lists(st.integers(0, 24), max_size=24))
def test_answer_is_the_text_before_the_first_stop(
    text: str, stops: list[str], borders: list[int]
) -> None:
    answer, stop = first_stop(text, stops)
    checker = StopChecker(stops, ())
    fed = emitted = ""
    for chunk in cut(text, borders):
        state = checker.update(1, chunk)
        fed += chunk
        emitted += state.emit
        reached = first_stop(fed, stops)
        assert (state.finished, state.matched) == (reached[1] is not None, reached[1])
        # Neither too early nor held back longer than needed.
        assert emitted == (reached[0] if state.finished else certain_part(fed, stops))
        if state.finished:
            break
    assert checker.finished is (stop is not None)
    assert emitted + checker.flush() == answer


@settings(max_examples=200, deadline=None)
@given(texts, texts, stop_lists)
def test_flush_searches_the_last_text(text: str, tail: str, stops: list[str]) -> None:
    checker = StopChecker(stops, (9,))
    state = checker.update(1, text)
    if not state.finished:
        checker.update(9, "dropped")
    assert state.emit + checker.flush(tail) == first_stop(text + tail, stops)[0]
    assert checker.finished
    assert checker.flush() == ""


def test_stop_string_across_tokens_is_never_shown() -> None:
    checker = StopChecker(("<end>", "\n\n"), ())
    pieces = ["Hi <", "en", "emy>\n", "more <e", "n", "d> rest"]
    states = [checker.update(0, piece) for piece in pieces]
    assert [state.emit for state in states] == ["Hi ", "", "<enemy>", "\nmore ", "", ""]
    assert states[-1] == StopState(emit="", finished=True, matched="<end>")
    assert checker.flush() == ""


def test_stop_token_ends_without_its_own_text() -> None:
    checker = StopChecker(("END",), (7, 8))
    assert checker.update(1, "the E") == StopState(emit="the ", finished=False)
    assert checker.update(8, "<|im_end|>") == StopState(emit="", finished=True, matched=8)
    assert checker.flush() == "E"


def test_without_stops_everything_is_emitted_at_once() -> None:
    checker = StopChecker((), ())
    assert checker.update(3, "any text") == StopState(emit="any text", finished=False)
    assert checker.flush() == ""


def test_update_after_the_end_is_a_bug() -> None:
    checker = StopChecker((), (5,))
    checker.update(5, "")
    with pytest.raises(RuntimeError, match="finished"):
        checker.update(1, "more")


@pytest.mark.parametrize("stops", ["END", [""], ["a", ""], [1], None, b"END"])
def test_bad_stop_strings_are_refused(stops: Any) -> None:
    with pytest.raises(InputError, match=r"^stop must"):
        StopChecker(stops, ())


@pytest.mark.parametrize("token_ids", [5, "5", [-1], [1.0], [True], [None]])
def test_bad_stop_token_ids_are_refused(token_ids: Any) -> None:
    with pytest.raises(InputError, match=r"^stop_token_ids must"):
        StopChecker((), token_ids)


@pytest.mark.parametrize("stops", [["d sq"], ["red", "square"], ["."], ["blue circle"], ["zzz"]])
def test_ends_at_the_same_token_as_transformers(stops: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    criteria = StopStringCriteria(tokenizer, stops)
    token_ids = tokenizer.encode("There is a red square left of the blue circle. The end.")
    expected = found = None
    checker = StopChecker(stops, ())
    for count, token in enumerate(token_ids, start=1):
        ends = criteria(torch.tensor([token_ids[:count]]), torch.empty(1, 1))
        if expected is None and bool(ends[0]):
            expected = count
        if found is None and checker.update(token, tokenizer.decode([token])).finished:
            found = count
    assert found == expected
    assert (found is None) == (stops == ["zzz"])
