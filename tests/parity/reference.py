"""What tests ask of transformers beyond `Reference`: endless answers, features, miswiring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen3vl_tools.reference import Reference

__all__ = ["edited_levels", "endless_answer", "visual_features"]

_PIXELS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
_NO_TOKEN = -1


@torch.inference_mode()
def endless_answer(
    reference: Reference, messages: list[dict[str, Any]], steps: int, penalty: float
) -> list[int]:
    """`steps` greedy tokens, going on after an end-of-sequence token."""
    inputs = reference.inputs(messages)
    output = reference.model.generate(
        **inputs,
        max_new_tokens=steps,
        do_sample=False,
        eos_token_id=_NO_TOKEN,
        repetition_penalty=penalty,
    )
    return [int(token) for token in output[0, inputs["input_ids"].shape[1] :]]


@torch.inference_mode()
def visual_features(
    reference: Reference, messages: list[dict[str, Any]], kind: str
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Features [tokens, hidden] and DeepStack [levels, tokens, hidden] of each image or video."""
    pixels, grids = (reference.inputs(messages).get(key) for key in _PIXELS[kind])
    if pixels is None or grids is None:
        return []
    visual = reference.model.model.visual
    output = visual(pixels, grid_thw=grids)
    embeds = output.pooler_output
    levels = output.deepstack_features
    deepstack = torch.stack(levels) if levels else embeds.new_zeros((0, *embeds.shape))
    sizes = [int(grid.prod()) // visual.spatial_merge_size**2 for grid in grids]
    return [
        (embed.numpy(), level.numpy())
        for embed, level in zip(embeds.split(sizes), deepstack.split(sizes, dim=1), strict=True)
    ]


@contextmanager
def edited_levels(
    reference: Reference, edit: Callable[[list[Tensor]], list[Tensor]]
) -> Iterator[None]:
    """Within the block, decoder layer `i` is followed by level `i` of what `edit` returns."""

    def edit_arguments(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs | {"deepstack_visual_embeds": edit(kwargs["deepstack_visual_embeds"])}

    model = reference.model.model.language_model
    hook = model.register_forward_pre_hook(edit_arguments, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
