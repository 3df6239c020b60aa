"""Prefill and the decode loop for one batch of prompts, whatever engine runs the graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from qwen3vl_runtime.positions import batch_position_ids, decode_position_ids
from qwen3vl_runtime.preprocess import PreparedPrompt
from qwen3vl_runtime.sampling import Sampler
from qwen3vl_runtime.sampling_params import ResolvedSampling
from qwen3vl_runtime.stopping import StopChecker
from qwen3vl_runtime.text_model import DecoderCall, TextModel
from qwen3vl_runtime.timing import GenerationTiming, StageTimer
from qwen3vl_runtime.tokenizer import StreamingDecoder, Tokenizer
from qwen3vl_runtime.vision_model import EncodedVisuals

__all__ = ["FinishReason", "GenerationResult", "StreamChunk", "generate_tokens", "prefill"]

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationResult:
    """One answer.

    Attributes:
        text: The answer, without special tokens and without the stop string that ended it.
        token_ids: Every sampled token, the one that ended the answer included.
        prompt_tokens: Tokens of the prompt, visual tokens included.
        finish_reason: "stop" or "length".
        timing: Where the time went.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    timing: GenerationTiming

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "timing": self.timing.to_dict(),
        }


@dataclass(frozen=True)
class StreamChunk:
    """One sampled token.

    Attributes:
        row: Index of the prompt in its batch.
        token_id: The token; the one that ends the answer is included.
        text: Text that this token made certain, often empty. All of a row's texts joined are
            its answer.
        finish_reason: Set on a row's last chunk: "stop" (a stop token or stop string), or
            "length" (`max_new_tokens` reached).
        result: The whole answer, on the last chunk of a stream.
    """

    row: int
    token_id: int
    text: str
    finish_reason: FinishReason | None
    result: GenerationResult | None = None


class _Row:
    """One sequence of the batch while it is being answered."""

    def __init__(self, prompt: PreparedPrompt, sampling: ResolvedSampling, tokenizer: Tokenizer):
        self.finished = False
        self.last_token = 0
        self.cached = prompt.num_tokens
        self._sampler = Sampler(sampling, prompt.layout.input_ids)
        self._stop = StopChecker(sampling.stop, sampling.stop_token_ids)
        self._decoder = StreamingDecoder(tokenizer)
        self._remaining = sampling.max_new_tokens

    def sample(self, logits: np.ndarray) -> tuple[int, str, FinishReason | None]:
        """Sample the next token from logits [vocab]; gives its text and whether it is the last."""
        token = self._sampler.sample(logits)
        state = self._stop.update(token, self._decoder.push(token))
        self.last_token = token
        self._remaining -= 1
        self.finished = state.finished or self._remaining == 0
        if not self.finished:
            return token, state.emit, None
        text = state.emit + self._stop.flush(self._decoder.finish())
        # The end of the text may itself complete a stop string that was held back.
        return token, text, "stop" if self._stop.finished else "length"


def generate_tokens(
    model: TextModel,
    prompts: Sequence[PreparedPrompt],
    features: EncodedVisuals,
    sampling: Sequence[ResolvedSampling],
    tokenizer: Tokenizer,
    timer: StageTimer,
    prefill_chunk: int,
) -> Iterator[StreamChunk]:
    """Answer a batch of prompts, yielding each token when it is sampled.

    The caller has laid out the cache for every row's prompt and new tokens. Closing the generator
    ends the generation between two steps.
    """
    rows = [
        _Row(prompt, params, tokenizer) for prompt, params in zip(prompts, sampling, strict=True)
    ]
    deltas = np.array([prompt.rope.rope_delta for prompt in prompts])
    with timer.stage("prefill"):
        logits = prefill(model, prompts, features, prefill_chunk)
    while True:
        chunks = []
        for index, row in enumerate(rows):
            if row.finished:
                continue
            token, text, reason = row.sample(logits[index])
            timer.token(index)
            chunks.append(StreamChunk(index, token, text, reason))
        yield from chunks
        if all(row.finished for row in rows):
            return
        logits = _decode_step(model, rows, deltas)


def prefill(
    model: TextModel,
    prompts: Sequence[PreparedPrompt],
    features: EncodedVisuals,
    chunk: int,
) -> np.ndarray:
    """Fill the cache with the prompts, right-padded, `chunk` tokens a call.

    Returns:
        Logits after each prompt's last token, float32 [batch, vocab].
    """
    lengths = np.array([prompt.num_tokens for prompt in prompts])
    longest = int(lengths.max())
    input_ids, visual_indices = _padded(prompts, longest)
    position_ids = batch_position_ids([prompt.rope for prompt in prompts])
    result: list[np.ndarray | None] = [None] * len(prompts)
    for start in range(0, longest, chunk):
        part = slice(start, min(start + chunk, longest))
        last = lengths - 1 - start  # where in this call each row's last token is
        call = DecoderCall(
            input_ids=np.ascontiguousarray(input_ids[:, part]),
            visual_indices=np.ascontiguousarray(visual_indices[:, part]),
            position_ids=np.ascontiguousarray(position_ids[:, :, part]),
            # A row that has ended writes its pads behind its own tokens, where they stay masked.
            write_indices=np.minimum(lengths, start),
            logits_indices=np.clip(last, 0, part.stop - start - 1)[:, None],
        )
        logits = model.forward(call, features)
        for row in np.flatnonzero((last >= 0) & (last < part.stop - start)):
            result[row] = logits[row, 0].copy()
    return np.stack([row for row in result if row is not None])


def _padded(prompts: Sequence[PreparedPrompt], longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and visual rows [batch, longest]; rows count through the whole batch's visuals."""
    input_ids = np.zeros((len(prompts), longest), np.int64)
    visual_indices = np.full((len(prompts), longest), -1, np.int64)
    offset = 0
    for row, prompt in enumerate(prompts):
        layout = prompt.layout
        input_ids[row, : prompt.num_tokens] = layout.input_ids
        visual_indices[row, : prompt.num_tokens] = np.where(
            layout.visual_indices >= 0, layout.visual_indices + offset, -1
        )
        offset += layout.num_visual_tokens
    return input_ids, visual_indices


def _decode_step(model: TextModel, rows: Sequence[_Row], deltas: np.ndarray) -> np.ndarray:
    """Run every row's last token; gives logits [batch, vocab], overwritten by the next step."""
    batch = len(rows)
    cached = np.array([row.cached for row in rows])
    call = DecoderCall(
        input_ids=np.array([[row.last_token] for row in rows]),
        visual_indices=np.full((batch, 1), -1, np.int64),
        position_ids=decode_position_ids(cached, deltas),
        # A finished row runs along at its last slot, which nothing reads any more.
        write_indices=np.minimum(cached, model.capacity - 1),
        logits_indices=np.zeros((batch, 1), np.int64),
    )
    for row in rows:
        row.cached += not row.finished
    return model.forward(call, model.no_visuals)[:, 0]  # [batch, vocab]
