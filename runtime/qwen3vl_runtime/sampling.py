"""From the logits of one sequence to its next token.

The logits processors and their order are those of transformers 5.24
(`GenerationMixin._get_logits_processor`): repetition penalty, temperature, top-k, top-p, min-p.
Only the draw differs: numpy's PCG64 by inverse CDF instead of `torch.multinomial`, so a seed gives
other tokens than it gives in torch, from the same distribution. Greedy decoding gives the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from qwen3vl_export.errors import ContractError, InputError
from qwen3vl_runtime.sampling_params import ResolvedSampling

__all__ = ["Sampler", "token_distribution"]


class Sampler:
    """Chooses the tokens of one sequence and remembers them for the repetition penalty.

    Each sequence has its own generator, so its tokens do not depend on what else is in the batch;
    sequences with equal seeds and prompts get equal tokens.
    """

    def __init__(
        self, resolved: ResolvedSampling, prompt_token_ids: Sequence[int] | npt.NDArray[np.integer]
    ) -> None:
        """Start after a prompt.

        Args:
            resolved: What `SamplingParams.resolve` returned.
            prompt_token_ids: [prompt] token ids, no padding, image placeholders included.

        Raises:
            InputError: The token ids are not a flat list of integers >= 0.
        """
        prompt = np.asarray(prompt_token_ids)
        if prompt.size and (prompt.ndim != 1 or prompt.dtype.kind not in "iu" or prompt.min() < 0):
            raise InputError(
                "prompt_token_ids must be a flat list of integers >= 0, found "
                f"{prompt.dtype}{list(prompt.shape)}; pass the tokenizer's ids of one sequence"
            )
        self._resolved = resolved
        # numpy loads its generators only when they are first used, which costs a greedy request
        # 40 ms for nothing.
        self._generator = _make_generator(resolved.seed) if resolved.do_sample else None
        self._seen = np.unique(prompt).astype(np.int64)

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """Choose the next token; the logits are not modified.

        Args:
            logits: float32 [vocab]; -inf forbids a token.

        Raises:
            ContractError: The logits have another shape or type, hold NaN or +inf, or are all -inf.
        """
        if logits.ndim != 1 or logits.dtype != np.float32 or not logits.size:
            raise ContractError(
                f"the decoder's logits must be float32 [vocab], found {logits.dtype}"
                f"{list(logits.shape)}; pass one row of them"
            )
        scores = self._penalise(logits)
        best = _best_token(scores)
        token = best if self._generator is None else self._draw(scores, self._generator)
        if self._resolved.repetition_penalty != 1 and token not in self._seen:
            self._seen = np.append(self._seen, token)
        return token

    def _penalise(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        penalty = self._resolved.repetition_penalty
        if penalty == 1:
            return logits
        scores = logits.copy()
        # Ids beyond the vocabulary cannot be generated, so there is nothing to penalise.
        seen = self._seen[self._seen < scores.size]
        values = scores[seen]  # [seen]
        scores[seen] = np.where(values < 0, values * penalty, values / penalty)
        return scores

    def _draw(self, scores: npt.NDArray[np.float32], generator: np.random.Generator) -> int:
        token_ids, probabilities = token_distribution(scores, self._resolved)
        cumulative = np.cumsum(probabilities)
        # Scaled by the last entry, which rounding can keep from being exactly 1.
        point = generator.random() * cumulative[-1]
        return int(token_ids[np.searchsorted(cumulative, point, side="right")])


def _make_generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def token_distribution(
    scores: npt.NDArray[np.float32], resolved: ResolvedSampling
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Tokens that may be drawn, and how likely: temperature, top-k, top-p, min-p in this order.

    Filters cut first and the rest is computed on what is left, in float64, where the temperature
    cannot make unequal float32 scores equal; top-k may therefore come before the temperature.

    Args:
        scores: float32 [vocab] logits after the repetition penalty, at least one finite, no NaN.
        resolved: Its temperature, top_k, top_p and min_p are used.

    Returns:
        Token ids in ascending order and their probabilities, which add up to 1: both [kept].
    """
    lowest = np.finfo(np.float32).min  # leaves out -inf
    if 0 < resolved.top_k < scores.size:
        kth = scores.size - resolved.top_k
        lowest = max(lowest, np.partition(scores, kth)[kth])
    token_ids = np.flatnonzero(scores >= lowest)
    kept_scores = scores[token_ids].astype(np.float64)  # [kept]
    with np.errstate(over="ignore"):  # a temperature near 0 gives exp(-inf), which is right
        weights = np.exp((kept_scores - kept_scores.max()) / resolved.temperature)
    if resolved.top_p < 1:
        kept = _nucleus(kept_scores, weights / weights.sum(), resolved.top_p)
        token_ids, weights = token_ids[kept], weights[kept]
    if resolved.min_p > 0:
        kept = np.flatnonzero(weights >= resolved.min_p * weights.max())
        token_ids, weights = token_ids[kept], weights[kept]
    return token_ids, weights / weights.sum()


def _nucleus(
    scores: npt.NDArray[np.float64], probabilities: npt.NDArray[np.float64], top_p: float
) -> npt.NDArray[np.int64]:
    """Ascending positions of the smallest set of most likely tokens that holds `top_p`.

    A token goes when it and all less likely ones hold at most `1 - top_p`; the most likely stays.
    """
    tail = 1.0 - top_p
    # A token below tail / count goes in any case, since all tokens up to it hold less than the
    # tail: sorting the rest, a small part of a large vocabulary, is enough. The factor leaves room
    # for the rounding of the sums.
    unlikely = probabilities < tail / probabilities.size * (1 - 1e-9)
    likely = np.flatnonzero(~unlikely)[::-1]
    # By score, since unequal scores may have equal probabilities. Reversed and stable, so that of
    # equal scores the first tokens stay, as in greedy decoding; torch.sort leaves that open.
    order = likely[np.argsort(scores[likely], kind="stable")]
    removed = probabilities[unlikely].sum() + np.cumsum(probabilities[order]) <= tail
    removed[-1] = False
    return np.sort(order[~removed])


def _best_token(scores: npt.NDArray[np.float32]) -> int:
    """The first most likely token; argmax finds NaN first, so that one look suffices."""
    best = int(np.argmax(scores))
    if not np.isfinite(scores[best]):
        raise ContractError(
            f"the decoder returned logits whose maximum is {scores[best]} (token {best}), expected "
            "a finite one; check the images and features given, or export the bundle again at a "
            "higher precision"
        )
    return best
