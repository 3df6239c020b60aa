"""The whole way from chat messages to an answer: preprocess, vision, prefill, decode.

`Runner` is the same for every engine; a subclass loads the sessions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qwen3vl_export.bundle import Bundle
from qwen3vl_export.contract import PRECISIONS
from qwen3vl_export.errors import InputError
from qwen3vl_runtime.generation import GenerationResult, StreamChunk, generate_tokens
from qwen3vl_runtime.image_processor import VisualInput
from qwen3vl_runtime.kv_cache import KVCache
from qwen3vl_runtime.limits import is_integer, shown
from qwen3vl_runtime.preprocess import PreparedPrompt, Preprocessor
from qwen3vl_runtime.sampling_params import ResolvedSampling, SamplingParams
from qwen3vl_runtime.session import Sessions, numpy_dtype
from qwen3vl_runtime.text_model import TextModel
from qwen3vl_runtime.timing import StageTimer
from qwen3vl_runtime.vision_model import EncodedVisuals, VisionModel

__all__ = ["Messages", "Runner", "RunnerOptions"]

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]

#: Cache slots are laid out in steps of this size, so that requests of similar length reuse
#: memory that is already mapped.
_CAPACITY_STEP = 64


@dataclass(frozen=True)
class RunnerOptions:
    """Limits that a runner reserves memory for.

    Attributes:
        capacity: Most tokens, prompt and answer, of one sequence; None takes 4096, or the
            model's `max_position_embeddings` when that is less.
        max_batch: Most sequences answered at once.
        prefill_chunk: Prompt tokens run in one call; bounds the memory of long prompts.
        allow_urls: Whether messages may name http(s) URLs to download.
    """

    capacity: int | None = None
    max_batch: int = 4
    prefill_chunk: int = 1024
    allow_urls: bool = False

    def __post_init__(self) -> None:
        """Refuse limits that are not positive; raises InputError."""
        for name in ("capacity", "max_batch", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not is_integer(value)):
                raise InputError(f"{name} must be a positive integer, found {shown(value)}")


class Runner:
    """Answers questions about images, videos and text with the graphs of one bundle.

    One request runs at a time; a second one while a stream is open is refused.
    """

    def __init__(self, bundle: Bundle, sessions: Sessions, options: RunnerOptions) -> None:
        """Prepare the caches and the preprocessing; use a subclass to load the sessions."""
        config = bundle.config
        dtype = numpy_dtype(PRECISIONS[bundle.manifest.precision])
        self.bundle = bundle
        self.options = options
        self.capacity = options.capacity or min(4096, config.text.max_position_embeddings)
        if self.capacity > config.text.max_position_embeddings:
            logger.warning(
                "capacity %d exceeds the %d positions the model was made for",
                self.capacity,
                config.text.max_position_embeddings,
            )
        self.preprocessor = Preprocessor(bundle, allow_urls=options.allow_urls)
        self.vision = VisionModel(sessions.vision, config, dtype)
        cache = self._reserve_cache(dtype)
        self.text = TextModel(sessions, config, cache, EncodedVisuals.none(config, dtype))
        self._dtype = dtype
        self._busy = threading.Lock()

    def _reserve_cache(self, dtype: np.dtype[np.generic]) -> KVCache:
        max_batch = self.options.max_batch
        try:
            return KVCache(self.bundle.config.text, dtype, max_batch, self.capacity)
        except (MemoryError, OverflowError, ValueError) as error:  # numpy raises all of these
            raise InputError(
                f"the KV cache of capacity {self.capacity} and max_batch {max_batch} does not fit "
                "into memory; lower one of them"
            ) from error

    def generate(
        self, messages: Messages, params: SamplingParams | None = None
    ) -> GenerationResult:
        """Answer one conversation.

        Args:
            messages: Chat messages in the Qwen / OpenAI content-list form.
            params: Sampling; what is left open comes from the checkpoint's generation config.

        Raises:
            InputError: The messages cannot be used, or do not fit the capacity.
        """
        return self.generate_batch([messages], params)[0]

    def generate_batch(
        self,
        conversations: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationResult]:
        """Answer several conversations at once; each gets the tokens it would get alone.

        Args:
            conversations: At most `max_batch`, of any lengths.
            params: One for all, or one each.

        Raises:
            InputError: As `generate`, or there are too many conversations.
        """
        with self._request() as timer:
            prompts, sampling = self._prepare(conversations, params, timer)
            chunks = list(self._run(prompts, sampling, timer))
        return [_collect(row, prompt, chunks, timer) for row, prompt in enumerate(prompts)]

    def stream(
        self, messages: Messages, params: SamplingParams | None = None
    ) -> Iterator[StreamChunk]:
        """Answer one conversation token by token.

        Closing the iterator (or breaking out of its loop) cancels the generation and frees the
        runner for the next request. The last chunk carries the whole result; the runner is free
        when it is given out.

        Raises:
            InputError: As `generate`, when the first chunk is asked for.
        """
        with self._request() as timer:
            prompts, sampling = self._prepare([messages], params, timer)
            chunks: list[StreamChunk] = []
            for chunk in self._run(prompts, sampling, timer):
                chunks.append(chunk)
                if chunk.finish_reason is None:
                    yield chunk
        # Outside the request: whoever stops at the last chunk may keep the iterator for long.
        yield replace(chunks[-1], result=_collect(0, prompts[0], chunks, timer))

    def encode(self, prompts: Sequence[PreparedPrompt]) -> EncodedVisuals:
        """Visual features of all prompts in order; equal frame sizes share a vision call."""
        visuals = [visual for prompt in prompts for visual in prompt.visuals]
        if not visuals:
            return self.text.no_visuals
        pixels = [visual for visual in visuals if isinstance(visual, VisualInput)]
        encoded = iter(self.vision.encode(pixels))
        return EncodedVisuals.concatenate(
            [
                next(encoded)
                if isinstance(visual, VisualInput)
                else EncodedVisuals.from_features(visual.embeds, self.bundle.config, self._dtype)
                for visual in visuals
            ]
        )

    @contextmanager
    def _request(self) -> Iterator[StageTimer]:
        """Hold the caches for one request."""
        if not self._busy.acquire(blocking=False):
            raise InputError(
                "this runner is answering another request; finish or close its stream first, or "
                "use one runner a thread"
            )
        try:
            yield StageTimer()
        finally:
            self._busy.release()

    def _prepare(
        self,
        conversations: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None,
        timer: StageTimer,
    ) -> tuple[list[PreparedPrompt], list[ResolvedSampling]]:
        """Preprocess and check every limit, before any graph runs."""
        if not isinstance(conversations, (list, tuple)):
            raise InputError(
                f"conversations must be a list of conversations, found {shown(conversations)}"
            )
        if not 1 <= len(conversations) <= self.options.max_batch:
            raise InputError(
                f"expected 1 to {self.options.max_batch} conversations (max_batch), found "
                f"{len(conversations)}"
            )
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(conversations)
        is_list = isinstance(params, (list, tuple))
        if not is_list or not all(isinstance(each, SamplingParams) for each in params):
            raise InputError(
                f"params must be SamplingParams, one for all or a list, found {shown(params)}"
            )
        if len(params) != len(conversations):
            raise InputError(
                f"expected one SamplingParams for all or {len(conversations)}, one each, found "
                f"{len(params)}"
            )
        with timer.stage("preprocess"):
            sampling = [each.resolve(self.preprocessor.defaults) for each in params]
            prompts = [self.preprocessor.prepare(messages) for messages in conversations]
        for prompt, each in zip(prompts, sampling, strict=True):
            self._check_fits(prompt.num_tokens, each.max_new_tokens)
        return prompts, sampling

    def _check_fits(self, prompt_tokens: int, max_new_tokens: int) -> None:
        needed = prompt_tokens + max_new_tokens
        if needed > self.capacity:
            raise InputError(
                f"the prompt's {prompt_tokens} tokens and max_new_tokens {max_new_tokens} need "
                f"{needed} cache slots, but the capacity is {self.capacity}; shorten the prompt, "
                "lower max_pixels or max_new_tokens, or open the runner with a larger capacity"
            )

    def _run(
        self,
        prompts: list[PreparedPrompt],
        sampling: list[ResolvedSampling],
        timer: StageTimer,
    ) -> Iterator[StreamChunk]:
        with timer.stage("vision"):
            features = self.encode(prompts)
        needed = max(
            prompt.num_tokens + each.max_new_tokens
            for prompt, each in zip(prompts, sampling, strict=True)
        )
        rounded = -(-needed // _CAPACITY_STEP) * _CAPACITY_STEP
        with timer.stage("prefill"):
            self.text.begin(len(prompts), min(rounded, self.capacity))
        yield from generate_tokens(
            self.text,
            prompts,
            features,
            sampling,
            self.preprocessor.tokenizer,
            timer,
            self.options.prefill_chunk,
        )


def _collect(
    row: int, prompt: PreparedPrompt, chunks: Sequence[StreamChunk], timer: StageTimer
) -> GenerationResult:
    own = [chunk for chunk in chunks if chunk.row == row]
    reason = own[-1].finish_reason
    assert reason is not None
    return GenerationResult(
        text="".join(chunk.text for chunk in own),
        token_ids=tuple(chunk.token_id for chunk in own),
        prompt_tokens=prompt.num_tokens,
        finish_reason=reason,
        timing=timer.finish(row),
    )
