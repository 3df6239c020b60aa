"""What a user may choose about sampling, joined with what the checkpoint recommends.

Parsed and checked once; the sampler sees only `ResolvedSampling`, in which nothing is open.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from qwen3vl_export.errors import CheckpointError, InputError, Qwen3VLError
from qwen3vl_runtime.limits import is_integer, is_real, shown
from qwen3vl_runtime.stopping import check_stop_strings, check_stop_token_ids

__all__ = ["GenerationDefaults", "ResolvedSampling", "SamplingParams"]

_logger = logging.getLogger(__name__)


class _Rule(NamedTuple):
    types: tuple[type, ...]
    accepts: Callable[[Any], bool]  # every comparison is false for NaN, which refuses it
    expected: str


_INTEGER = (int, np.integer)
_REAL = (int, float, np.integer, np.floating)
_TOKEN_ID = _Rule(_INTEGER, lambda v: v >= 0, "a token id (an integer >= 0)")
_RULES = {
    "max_new_tokens": _Rule(_INTEGER, is_integer, "an integer >= 1 (below 2^63)"),
    "temperature": _Rule(
        _REAL,
        lambda v: is_real(v, 0, sys.float_info.max),  # refuses integers that are no float
        "a finite number >= 0 (0 is greedy)",
    ),
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
        if self.temperature == 0 and self._filters:
            raise InputError(
                "temperature=0 (greedy) contradicts top_k, top_p or min_p, found "
                f"{[getattr(self, name) for name in _WARPERS[1:]]}; drop temperature or those"
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


def _checked(name: str, value: Any, error: type[Qwen3VLError], where: str = "") -> Any:
    rule = _RULES[name]
    is_kind = isinstance(value, rule.types) and (bool in rule.types or not isinstance(value, bool))
    if not is_kind or not rule.accepts(value):
        raise error(f"{where}{name} must be {rule.expected}, found {shown(value)}")
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
