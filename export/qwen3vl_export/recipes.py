"""What each target and precision makes of each component: the choices that measurements decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qwen3vl_export.quantization import BlockScheme, ChannelScheme, Scheme

__all__ = ["ComponentPlan", "component_plans"]

#: 128 inputs a scale: at 32, the products of many tokens take 1.5 times as long.
_BLOCK_SIZE = 128
_INT8_BLOCKS = BlockScheme(8, _BLOCK_SIZE)
_INT8_CHANNELS = ChannelScheme()
_DECODER_SCHEMES = {"int8": _INT8_BLOCKS, "int4": BlockScheme(4, _BLOCK_SIZE)}


@dataclass(frozen=True)
class ComponentPlan:
    """One graph of a bundle.

    Attributes:
        name: Its name in the bundle.
        component: The component that is traced, one of `contract.COMPONENTS`.
        is_lowered: Whether the passes of `lowering` run on it.
        choose: How a linear's weight is quantised, by its name; None leaves it in float.
    """

    name: str
    component: str
    is_lowered: bool
    choose: Callable[[str], Scheme | None]


def component_plans(
    components: tuple[str, ...], target: str, precision: str, prefill_precision: str | None
) -> list[ComponentPlan]:
    """The graphs that an export makes, in order.

    Args:
        components: Of `contract.COMPONENTS`.
        target: Key of `contract.TARGETS`.
        precision: One of the target's precisions.
        prefill_precision: "int8" adds a second decoder graph for calls of many tokens.
    """
    is_lowered = target != "onnx"
    chooser = {
        "vision": _vision_scheme if precision in _DECODER_SCHEMES else _keep_float,
        "embedding": _keep_float,
        "decoder": _uniform(_DECODER_SCHEMES.get(precision)),
    }
    plans = [ComponentPlan(name, name, is_lowered, chooser[name]) for name in components]
    if prefill_precision is not None and "decoder" in components:
        plans.append(ComponentPlan("decoder_prefill", "decoder", is_lowered, _prefill_scheme))
    return plans


def _keep_float(name: str) -> Scheme | None:
    return None


def _uniform(scheme: Scheme | None) -> Callable[[str], Scheme | None]:
    return lambda name: scheme


def _vision_scheme(name: str) -> Scheme | None:
    # The patch embedding reads pixels and is less than 1 % of the work: it stays in float.
    return None if name.startswith("patch_embed.") else _INT8_CHANNELS


def _prefill_scheme(name: str) -> Scheme | None:
    # The head scores one token a prompt, for which block-wise products are faster.
    return _INT8_BLOCKS if name.startswith("lm_head.") else _INT8_CHANNELS
