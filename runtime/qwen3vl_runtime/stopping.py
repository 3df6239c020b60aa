"""When a sequence ends, and which of its text may already be shown.

Stop strings live in text while generation makes tokens, so a stop string may begin in one token
and end in another. Text that could still become one is therefore held back until it is decided.
This module knows neither the tokenizer nor the engine: it is fed token ids and decoded text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qwen3vl_export.errors import InputError

__all__ = ["StopChecker", "StopState", "check_stop_strings", "check_stop_token_ids"]


@dataclass(frozen=True)
class StopState:
    """What one update decided.

    Attributes:
        emit: Text that is now certain to be part of the answer; may be empty.
        finished: Whether the sequence ends here.
        matched: The stop string or stop token id that ended it, else None.
    """

    emit: str
    finished: bool
    matched: str | int | None = None


class StopChecker:
    """Stop strings and stop tokens of one sequence.

    The answer depends on the text alone, not on how it was cut into tokens. The stop string whose
    last character comes first wins, because generation ends there; of several that end on the same
    character the longest wins. The answer is cut right before the stop string.
    """

    def __init__(self, stop_strings: Sequence[str], stop_token_ids: Sequence[int]) -> None:
        """Start with no text seen.

        Args:
            stop_strings: Texts that end the answer and are not part of it; case matters.
            stop_token_ids: Token ids that end the answer, e.g. the end-of-sequence ids.

        Raises:
            InputError: A stop string is empty, or an argument is not of the type above.
        """
        self._stop_strings = check_stop_strings(stop_strings)
        self._stop_token_ids = frozenset(check_stop_token_ids(stop_token_ids))
        self._longest_prefix = max((len(stop) for stop in self._stop_strings), default=1) - 1
        self._held = ""
        self._finished = False
        self._matched_string = False

    @property
    def finished(self) -> bool:
        """Whether a stop string or stop token was met."""
        return self._finished

    def update(self, token_id: int, text: str) -> StopState:
        """Take one generated token and the text it released.

        A stop token's own text is not part of the answer: `text` is dropped with it. Whatever is
        still held back then comes from `flush`, which ends every sequence.

        Args:
            token_id: The generated token.
            text: What the detokenizer released for it; empty while it waits for more bytes.

        Raises:
            RuntimeError: The sequence had already finished.
        """
        if self._finished:
            raise RuntimeError("StopChecker.update was called after the sequence had finished")
        if token_id in self._stop_token_ids:
            self._finished = True
            return StopState(emit="", finished=True, matched=int(token_id))
        return self._push(text)

    def flush(self, text: str = "") -> str:
        """Text of the answer that was held back; call it once, when generation has ended.

        Args:
            text: What the detokenizer itself still held back, e.g. an incomplete character; it is
                searched for stop strings like any other text.
        """
        if self._matched_string:
            return ""
        state = self._push(text)
        rest = state.emit + self._held
        self._held = ""
        return rest

    def _push(self, text: str) -> StopState:
        buffer = self._held + text
        hit = _first_match(buffer, self._stop_strings)
        if hit is not None:
            start, stop = hit
            self._held = ""
            self._finished = self._matched_string = True
            return StopState(emit=buffer[:start], finished=True, matched=stop)
        border = len(buffer) - self._undecided(buffer)
        self._held = buffer[border:]
        return StopState(emit=buffer[:border], finished=False)

    def _undecided(self, buffer: str) -> int:
        """Length of the longest end of `buffer` with which some stop string begins."""
        for length in range(min(self._longest_prefix, len(buffer)), 0, -1):
            if any(stop.startswith(buffer[-length:]) for stop in self._stop_strings):
                return length
        return 0


def _first_match(buffer: str, stop_strings: tuple[str, ...]) -> tuple[int, str] | None:
    """Start and text of the stop string that ends first, the longest one on a tie."""
    starts = ((buffer.find(stop), stop) for stop in stop_strings)
    hits = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    if not hits:
        return None
    _, start, stop = min(hits)
    return start, stop


def check_stop_strings(stop_strings: Sequence[str]) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises:
        InputError: It is a bare string (whose characters would each become a stop string), not a
            list or tuple of strings, or holds an empty string (which would match at once).
    """
    if not isinstance(stop_strings, (list, tuple)) or not all(
        isinstance(stop, str) for stop in stop_strings
    ):
        raise InputError(
            f"stop must be a list of strings, found {stop_strings!r}; write a single stop string "
            "as a list of one"
        )
    if "" in stop_strings:
        raise InputError("stop must hold no empty string, found one; remove it")
    return tuple(stop_strings)


def check_stop_token_ids(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Stop token ids as a tuple of Python integers.

    Raises:
        InputError: It is not a list or tuple of integers >= 0.
    """
    if not isinstance(token_ids, (list, tuple)) or not all(
        isinstance(token, (int, np.integer)) and not isinstance(token, bool) and token >= 0
        for token in token_ids
    ):
        raise InputError(
            f"stop_token_ids must be a list of integers >= 0, found {token_ids!r}; take the ids "
            "from the checkpoint's tokenizer"
        )
    return tuple(int(token) for token in token_ids)
