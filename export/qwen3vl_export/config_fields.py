"""Typed reading of single values of a Hugging Face `config.json`.

Each function raises CheckpointError, which names the key, when the value is of another type or out
of range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from qwen3vl_export.errors import CheckpointError

__all__ = [
    "MAX_SIZE",
    "get_mapping",
    "get_optional_mapping",
    "get_positive",
    "get_positive_float",
    "get_token_id",
    "get_value",
]

T = TypeVar("T", int, str, bool)

#: Far above any model: beyond it a shape overflows, or building it takes minutes.
MAX_SIZE = 1 << 24


def get_mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object `config[key]`, which must be there."""
    value = config.get(key)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json must have an object {key!r}, found {value!r}")
    return value


def get_optional_mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object `config[key]`; empty where it is absent or null."""
    return {} if config.get(key) is None else get_mapping(config, key)


def get_value(config: Mapping[str, Any], key: str, kind: type[T], default: T) -> T:
    """`config[key]` of exactly this type, or `default` where it is absent."""
    value = config.get(key, default)
    if type(value) is not kind:
        raise CheckpointError(
            f"config.json: {key} must be of type {kind.__name__}, found {value!r}"
        )
    return value


def get_positive(config: Mapping[str, Any], key: str, default: int, largest: int = MAX_SIZE) -> int:
    """A whole number from 1 to `largest`."""
    value = get_value(config, key, int, default)
    if not 0 < value <= largest:
        raise CheckpointError(
            f"config.json: {key} must be positive and at most {largest}, found {value}"
        )
    return value


def get_token_id(config: Mapping[str, Any], key: str, default: int, vocab_size: int) -> int:
    """A token id of the vocabulary."""
    value = get_value(config, key, int, default)
    if not 0 <= value < vocab_size:
        raise CheckpointError(
            f"config.json: {key} must be a token of the vocabulary, 0 to {vocab_size - 1}, "
            f"found {value}"
        )
    return value


def get_positive_float(config: Mapping[str, Any], key: str, default: float) -> float:
    """A finite number above zero."""
    value = config.get(key, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {key} must be a positive number, found {value!r}")
    return float(value)
