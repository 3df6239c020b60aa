"""From the logits of one sequence to its next token.

The logits processors and their order are those of transformers 5.24
(`GenerationMixin._get_logits_processor`): repetition penalty, temperature, top-k, top-p, min-p.
Only the draw differs: numpy's PCG64 by inverse CDF instead of `torch.multinomial`, so a seed gives
other tokens than it gives in torch, from the same distribution. Greedy decoding gives the same.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from qwen3vl_export.errors import CheckpointError, ContractError, InputError, Qwen3VLError
from qwen3vl_runtime.stopping import check_stop_strings, check_stop_token_ids

__all__ = [
    "GenerationDefaults",
    "ResolvedSampling",
    "Sampler",
    "SamplingParams",
    "token_distribution",
]

_logger = logging.getLogger(__name__)


class _Rule(NamedTuple):
    types: tuple[type, ...]
    accepts: Callable[[Any], bool]  # every comparison is false for NaN, which refuses it
    expected: str


_INTEGER = (int, np.integer)
_REAL = (int, float, np.integer, np.floating)
_TOKEN_ID = _Rule(_INTEGER, lambda v: v >= 0, "a token id (an integer >= 0)")
_RULES = {
    "max_new_tokens": _Rule(_INTEGER, lambda v: v >= 1, "an integer >= 1"),
    "temperature": _Rule(_REAL, lambda v: 0 <= v < np.inf, "a finite number >= 0 (0 is greedy)"),
    "top_k": _Rule(_INTEGER, lambda v: v >= 0, "an integer >= 0 (0 keeps every token)"),
    "top_p": _Rule(_REAL, lambda v: 0 < v <= 1, "a number in (0, 1] (1 keeps every token)"),
    "min_p": _Rule(_REAL, lambda v: 0 <= v <= 1, "a number in [0, 1] (0 keeps every token)"),
    # Bounded, so that no penalised float32 logit overflows.
    "repetition_penalty": _Rule(_REAL, lambda v: 0.01 <= v <= 100, "a number in [0.01, 100]"),
    "seed": _Rule(_INTEGER, lambda v: v >= 0, "an integer >= 0"),
    "do_sample": _Rule((bool,), lambda v: True, "true or false"),
    "ignore_eos": _Rule((bool,), lambda v: True, "true or false"),
    "eos_token_id": _TOKEN_ID,
    "pad_token_id": _TOKEN_ID,
    "bos_token_id": _TOKEN_ID,
}
_WARPERS = ("temperature", "top_k", "top_p", "min_p")

# generation_config.json: settings that cannot change the tokens, or that the request replaces.
_INERT = """
    transformers_version _from_model_config _commit_hash use_cache cache_implementation cache_config
    max_cache_len output_attentions output_hidden_states output_scores output_logits low_memory
    return_dict_in_generate max_length max_new_tokens decoder_start_token_id is_assistant use_mtp
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight
    prompt_lookup_num_tokens max_matching_ngram_size speculation_type compile_config
    disable_compile continuous_batching_config prefill_chunk_size
"""
# Settings that do nothing at 1, or at 0; any other does nothing at null, false or [].
_NEUTRAL_AT_1 = """
    num_beams num_beam_groups num_return_sequences typical_p encoder_repetition_penalty
    length_penalty guidance_scale
"""
_NEUTRAL_AT_0 = """
    diversity_penalty epsilon_cutoff eta_cutoff no_repeat_ngram_size encoder_no_repeat_ngram_size
    min_length min_new_tokens penalty_alpha
"""
_HARMLESS = dict.fromkeys(_NEUTRAL_AT_1.split(), 1) | dict.fromkeys(_NEUTRAL_AT_0.split(), 0)


@dataclass(frozen=True)
class GenerationDefaults:
    """A checkpoint's `generation_config.json`; a default here is the neutral value.

    The neutral `top_k` is 0 (every token), not the 50 that transformers falls back to.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    bos_token_id: int | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> GenerationDefaults:
        """Parse the content of a `generation_config.json`.

        Length limits in it (`max_length`, `max_new_tokens`) are not read: the request sets the
        length. A setting this runtime does not support, or does not know, is named in a warning
        unless its value does nothing (e.g. `num_beams` 1).

        Raises:
            CheckpointError: A value is out of range or of the wrong type.
        """

        def checked(name: str, value: object) -> Any:
            return _checked(name, value, CheckpointError, "generation_config.json: ")

        given = {key: value for key, value in config.items() if value is not None}
        eos = given.pop("eos_token_id", [])
        eos_ids = tuple(
            checked("eos_token_id", token) for token in (eos if isinstance(eos, list) else [eos])
        )
        known = [name for name in cls.__dataclass_fields__ if name in _RULES and name in given]
        fields = {name: checked(name, given.pop(name)) for name in known}
        _warn_unsupported(given)
        return cls(eos_token_ids=eos_ids, **fields)


@dataclass(frozen=True)
class ResolvedSampling:
    """`SamplingParams` after `resolve`, nothing left open; fields mean what they mean there.

    Greedy decoding (`do_sample` false) has the neutral temperature, top_k, top_p and min_p.
    `stop_token_ids` holds the end-of-sequence ids first, then the request's own.
    """

    max_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SamplingParams:
    """What a user may choose for one request.

    None means the value in the checkpoint's `generation_config.json`, else the neutral one.

    Attributes:
        max_new_tokens: Most tokens to generate.
        temperature: Divisor of the logits; 0 is greedy decoding.
        top_k: Keep the k most likely tokens (and ties with the k-th); 0 keeps all.
        top_p: Keep the smallest set of most likely tokens that holds this probability.
        min_p: Keep tokens at least this fraction as likely as the most likely one.
        repetition_penalty: Divides the positive and multiplies the negative logits of every token
            that occurs in the prompt or the answer, in greedy decoding too.
        seed: Seed of the draws; None picks one, to be read from `ResolvedSampling.seed`.
        do_sample: Draw instead of taking the most likely token. If None, a `temperature` above 0
            or a `top_k`, `top_p` or `min_p` that removes tokens turns sampling on when given
            here, `temperature` 0 turns it off, and otherwise the checkpoint decides.
        stop: Texts that end the answer; not part of it.
        stop_token_ids: Token ids that end the answer besides the checkpoint's end-of-sequence ids.
        ignore_eos: Do not stop at the checkpoint's end-of-sequence ids.
    """

    max_new_tokens: int = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    do_sample: bool | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            InputError: A value is out of range or of the wrong type, or two contradict each other.
        """
        for name in _RULES.keys() & self.__dataclass_fields__.keys():
            value = getattr(self, name)
            if value is not None or name in ("max_new_tokens", "ignore_eos"):
                _checked(name, value, InputError)
        check_stop_strings(self.stop)
        check_stop_token_ids(self.stop_token_ids)
        if self.do_sample and self.temperature == 0:
            raise InputError("do_sample=True contradicts temperature=0 (greedy); drop one of them")
        # Temperature 1 is let through: callers spell out "no scaling" beside do_sample=False.
        if self.do_sample is False and (self._filters or self.temperature not in (None, 0, 1)):
            raise InputError(
                "do_sample=False (greedy) contradicts temperature, top_k, top_p or min_p, found "
                f"{[getattr(self, name) for name in _WARPERS]}; drop do_sample or those"
            )

    def resolve(self, generation_config: GenerationDefaults) -> ResolvedSampling:
        """Fill every open value from the checkpoint, and pick a seed if there is none.

        Raises:
            InputError: Sampling is on, but the checkpoint's temperature is 0 and none was given.
        """

        def choose(name: str) -> Any:
            value = getattr(self, name)
            return getattr(generation_config, name) if value is None else value

        do_sample = self.temperature != 0 and choose("do_sample")
        if self.do_sample is None and (self._filters or self.temperature):
            do_sample = self.temperature != 0
        if do_sample and choose("temperature") == 0:
            raise InputError(
                "sampling needs a temperature > 0, found 0 in generation_config.json; give a "
                "temperature, or do_sample=False for greedy decoding"
            )
        warpers = {n: choose(n) if do_sample else getattr(_NO_DEFAULTS, n) for n in _WARPERS}
        eos_ids = () if self.ignore_eos else generation_config.eos_token_ids
        return ResolvedSampling(
            max_new_tokens=int(self.max_new_tokens),
            do_sample=bool(do_sample),
            temperature=float(warpers["temperature"]),
            top_k=int(warpers["top_k"]),
            top_p=float(warpers["top_p"]),
            min_p=float(warpers["min_p"]),
            repetition_penalty=float(choose("repetition_penalty")),
            seed=secrets.randbits(63) if self.seed is None else int(self.seed),
            stop=check_stop_strings(self.stop),
            stop_token_ids=tuple(
                dict.fromkeys((*eos_ids, *check_stop_token_ids(self.stop_token_ids)))
            ),
        )

    @property
    def _filters(self) -> bool:
        """Whether top_k, top_p or min_p was given a value that removes tokens."""
        return bool(self.top_k or self.min_p or (self.top_p is not None and self.top_p < 1))


_NO_DEFAULTS = GenerationDefaults()


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
        self._generator = np.random.Generator(np.random.PCG64(resolved.seed))
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
        token = self._draw(scores) if self._resolved.do_sample else best
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

    def _draw(self, scores: npt.NDArray[np.float32]) -> int:
        token_ids, probabilities = token_distribution(scores, self._resolved)
        cumulative = np.cumsum(probabilities)
        # Scaled by the last entry, which rounding can keep from being exactly 1.
        point = self._generator.random() * cumulative[-1]
        return int(token_ids[np.searchsorted(cumulative, point, side="right")])


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
            "a finite one; run `verify` on this bundle, or export it at a higher precision"
        )
    return best


def _checked(name: str, value: Any, error: type[Qwen3VLError], where: str = "") -> Any:
    rule = _RULES[name]
    is_kind = isinstance(value, rule.types) and (bool in rule.types or not isinstance(value, bool))
    if not is_kind or not rule.accepts(value):
        raise error(f"{where}{name} must be {rule.expected}, found {value!r}")
    return value


def _warn_unsupported(settings: Mapping[str, Any]) -> None:
    active = [
        f"{key}={value!r}"
        for key, value in settings.items()
        if key not in _INERT.split()
        and value is not False
        and value != []
        and not (key in _HARMLESS and value == _HARMLESS[key])
    ]
    if active:
        _logger.warning(
            "generation_config.json: ignoring settings that are not supported: %s; answers may "
            "differ from transformers",
            ", ".join(active),
        )
