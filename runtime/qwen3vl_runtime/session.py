"""What the runtime asks of an inference engine: run one component on named arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np

from qwen3vl_export.bundle import Component
from qwen3vl_export.contract import TensorSpec
from qwen3vl_export.errors import ContractError

__all__ = ["Session", "Sessions", "TensorInfo", "check_session", "numpy_dtype"]


class Session(Protocol):
    """One loaded component."""

    def run(
        self,
        feed: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Run the component.

        Args:
            feed: Every input by its contract name, C-contiguous and of the contract's dtype.
            outputs: Arrays to write outputs into. An output given the array of an input (a KV
                cache) is written in place. Outputs left out are allocated by the engine.

        Returns:
            Every output by its contract name; those in `outputs` are the arrays given.
        """
        ...


@dataclass(frozen=True)
class Sessions:
    """The loaded components of one bundle.

    Attributes:
        vision: The vision encoder.
        embedding: Token lookup and merge.
        decoder: The decoder.
        decoder_prefill: The decoder in the form that is fastest for calls of many tokens, over the
            same cache; None where the bundle has one decoder for both.
    """

    vision: Session
    embedding: Session
    decoder: Session
    decoder_prefill: Session | None = None


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as an engine reports it; symbolic dimensions are None."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


def check_session(
    component: Component, inputs: list[TensorInfo], outputs: list[TensorInfo], origin: str
) -> None:
    """Compare what an engine loaded with what the manifest promises.

    Raises:
        ContractError: A tensor is missing, unexpected, or of another shape or type.
    """
    for direction, found, specs in (
        ("input", inputs, component.inputs),
        ("output", outputs, component.outputs),
    ):
        expected = {spec.name: _describe(spec) for spec in specs}
        actual = {info.name: (info.shape, info.dtype) for info in found}
        if expected != actual:
            names = sorted(
                name
                for name in expected.keys() | actual.keys()
                if expected.get(name) != actual.get(name)
            )
            name = names[0]
            raise ContractError(
                f"{origin} differs from its manifest in {len(names)} {direction}(s), first "
                f"{name!r}: expected {expected.get(name)}, found {actual.get(name)}; "
                "export the bundle again"
            )


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The numpy type of a contract dtype such as "float16" or "bfloat16"."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _describe(spec: TensorSpec) -> tuple[tuple[int | None, ...], str]:
    return tuple(dim if isinstance(dim, int) else None for dim in spec.shape), spec.dtype
