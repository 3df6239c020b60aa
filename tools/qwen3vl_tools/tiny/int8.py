"""The naive W8A8 that outliers break: one static scale for each activation tensor.

Activations: symmetric, the largest magnitude seen in calibration. Weights: symmetric, one scale
an output channel. Every linear is quantized, the output layer included; rounding is simulated in
floating point.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration

from qwen3vl_tools.tiny.batching import Batch
from qwen3vl_tools.tiny.forward import answer_logits, encode

__all__ = ["naive_w8a8"]

_LEVELS = 127


def naive_w8a8(
    model: Qwen3VLForConditionalGeneration, calibration: Sequence[Batch]
) -> Qwen3VLForConditionalGeneration:
    """A copy of the model that computes as W8A8 would."""
    quantized = copy.deepcopy(model)
    # The output layer is tied to the embedding, which stays in floating point.
    quantized.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    linears = [module for module in quantized.modules() if isinstance(module, nn.Linear)]
    peaks = _peaks(quantized, linears, calibration)
    for linear, peak in zip(linears, peaks, strict=True):
        with torch.no_grad():
            linear.weight.copy_(_rounded(linear.weight, linear.weight.abs().amax(1, keepdim=True)))
        linear.register_forward_pre_hook(_quantizer(peak))
    return quantized


def _peaks(
    model: Qwen3VLForConditionalGeneration,
    linears: list[nn.Linear],
    calibration: Sequence[Batch],
) -> list[Tensor]:
    peaks = [torch.zeros(()) for _ in linears]

    def watch(index: int) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            peaks[index] = torch.maximum(peaks[index], inputs[0].abs().max())

        return hook

    handles = [
        linear.register_forward_pre_hook(watch(index)) for index, linear in enumerate(linears)
    ]
    with torch.no_grad():
        for batch in calibration:
            answer_logits(model, batch, encode(model, batch))
    for handle in handles:
        handle.remove()
    return peaks


def _quantizer(peak: Tensor) -> Any:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (_rounded(inputs[0], peak), *inputs[1:])

    return hook


def _rounded(x: Tensor, peak: Tensor) -> Tensor:
    scale = peak.clamp(min=1e-12) / _LEVELS
    return (x / scale).round().clamp(-_LEVELS, _LEVELS) * scale
