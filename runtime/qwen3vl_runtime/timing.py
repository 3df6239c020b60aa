"""Raw times of one generation request, and the clock that takes them.

Kept raw (one gap per token) because percentiles cannot be rebuilt from a mean. A GPU works
asynchronously: whoever ends a stage or marks a token must have the result on the host by then,
which is so once the logits were copied and a token was sampled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

__all__ = ["GenerationTiming", "Stage", "StageTimer"]

Stage = Literal["preprocess", "vision", "prefill"]

_STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class GenerationTiming:
    """Times of one request in milliseconds, all on one monotonic clock.

    Attributes:
        preprocess_ms: Prompt templating, tokenising and image processing.
        vision_ms: Vision encoder, all images and videos; 0 for a text-only request.
        prefill_ms: Decoder over the whole prompt, all chunks.
        ttft_ms: Request start to first token sampled (time to first token).
        inter_token_ms: Gaps between consecutive tokens; one fewer than there are tokens.
        e2e_ms: Request start to last token sampled (end to end).
    """

    preprocess_ms: float
    vision_ms: float
    prefill_ms: float
    ttft_ms: float
    inter_token_ms: tuple[float, ...]
    e2e_ms: float

    def __post_init__(self) -> None:
        """Check what every real measurement satisfies."""
        stages = (self.preprocess_ms, self.vision_ms, self.prefill_ms)
        times = (*stages, self.ttft_ms, *self.inter_token_ms, self.e2e_ms)
        assert all(math.isfinite(t) and t >= 0 for t in times), f"impossible time in {self}"
        assert self.e2e_ms > 0, f"a request takes some time, found {self}"
        assert self.ttft_ms <= self.e2e_ms, f"first token after the last one in {self}"

    @property
    def output_tokens(self) -> int:
        """Number of tokens sampled."""
        return len(self.inter_token_ms) + 1

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first: (E2E - TTFT) / (tokens - 1); None for one."""
        if not self.inter_token_ms:
            return None
        return (self.e2e_ms - self.ttft_ms) / len(self.inter_token_ms)

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens sampled per second of the whole request, prefill included."""
        return self.output_tokens / (self.e2e_ms / 1000.0)

    def to_dict(self) -> dict[str, float | int | list[float] | None]:
        """Raw and derived values under names that carry their unit, ready for JSON."""
        return {
            "preprocess_ms": self.preprocess_ms,
            "vision_ms": self.vision_ms,
            "prefill_ms": self.prefill_ms,
            "ttft_ms": self.ttft_ms,
            "inter_token_ms": list(self.inter_token_ms),
            "e2e_ms": self.e2e_ms,
            "output_tokens": self.output_tokens,
            "tpot_ms": self.tpot_ms,
            "output_tokens_per_s": self.output_tokens_per_s,
        }


class StageTimer:
    """Takes the times of one request; creating it is the request's start.

    Example:
        timer = StageTimer()
        with timer.stage("prefill"):
            logits = prefill(prompt)
        token = sampler.sample(logits)
        timer.token()
        timing = timer.finish()
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start the request.

        Args:
            clock: Monotonic time in seconds.
        """
        self._clock = clock
        self._stage_s: dict[Stage, float] = dict.fromkeys(_STAGES, 0.0)
        self._open_stage: Stage | None = None
        self._token_s: dict[int, list[float]] = {}
        self._start_s = clock()

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Add the time spent inside the `with` block to a stage.

        A stage may be entered again (one vision call per image size, chunks of a prefill): its
        times add up. Stages do not nest, since the inner one would be counted twice.
        """
        assert name in _STAGES, f"stage must be one of {_STAGES}, found {name!r}"
        assert self._open_stage is None, f"stage {name!r} inside stage {self._open_stage!r}"
        self._open_stage = name
        begin_s = self._clock()
        try:
            yield
        finally:
            self._stage_s[name] += self._clock() - begin_s
            self._open_stage = None

    def token(self, row: int = 0) -> None:
        """Mark that a token of a row of the batch has just been sampled."""
        self._token_s.setdefault(row, []).append(self._clock())

    def finish(self, row: int = 0) -> GenerationTiming:
        """The times of a row so far, in which at least one token must have been marked.

        The rows of a batch share its start and its stages.
        """
        assert row in self._token_s, "finish() needs at least one token()"
        token_s = self._token_s[row]
        return GenerationTiming(
            preprocess_ms=1000.0 * self._stage_s["preprocess"],
            vision_ms=1000.0 * self._stage_s["vision"],
            prefill_ms=1000.0 * self._stage_s["prefill"],
            ttft_ms=1000.0 * (token_s[0] - self._start_s),
            inter_token_ms=tuple(
                1000.0 * (later - earlier) for earlier, later in pairwise(token_s)
            ),
            e2e_ms=1000.0 * (token_s[-1] - self._start_s),
        )
