"""What can be taken from the model or its input to see whether the answers depend on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen3vl_tools.tiny.batching import Batch
from qwen3vl_tools.tiny.forward import Features, unchanged
from qwen3vl_tools.tiny.samples import Sample, with_images_swapped, with_pairs_reversed

__all__ = ["ABLATIONS", "INTACT", "Ablation"]


def _same_sample(sample: Sample) -> Sample:
    return sample


def _same_batch(batch: Batch) -> Batch:
    return batch


@dataclass(frozen=True)
class Ablation:
    """One change; whatever is not given stays as it is.

    Attributes:
        name: how reports call it.
        kinds: the question kinds it is about; empty for all.
        sample: changes the pictures, and so also the tokens they become.
        batch: changes token positions.
        features: changes what the vision encoder gives.
    """

    name: str
    kinds: tuple[str, ...] = ()
    sample: Callable[[Sample], Sample] = _same_sample
    batch: Callable[[Batch], Batch] = _same_batch
    features: Callable[[Features], Features] = unchanged


def _without_levels(*levels: int) -> Callable[[Features], Features]:
    def edit(features: Features) -> Features:
        kept: list[Tensor] = [
            torch.zeros_like(level) if index in levels else level
            for index, level in enumerate(features.levels)
        ]
        return replace(features, levels=tuple(kept))

    return edit


def _without_merger(features: Features) -> Features:
    return replace(features, merged=torch.zeros_like(features.merged))


def _in_line(batch: Batch) -> Batch:
    """Plain one-dimensional positions; right for rows with one question only."""
    length = batch.input_ids.shape[1]
    line = torch.arange(length).expand_as(batch.position_ids)  # (3, batch, length)
    return replace(batch, position_ids=line)


INTACT = Ablation("intact")
ABLATIONS: tuple[Ablation, ...] = (
    Ablation("DeepStack level 0 zero", features=_without_levels(0)),
    Ablation("DeepStack level 1 zero", features=_without_levels(1)),
    Ablation("DeepStack level 2 zero", features=_without_levels(2)),
    Ablation("all DeepStack levels zero", features=_without_levels(0, 1, 2)),
    Ablation("main merger zero", features=_without_merger),
    Ablation("one-dimensional positions", batch=_in_line),
    Ablation("images swapped", ("which", "color2"), sample=with_images_swapped),
    Ablation("temporal patches reversed", ("move", "vcolor", "order"), sample=with_pairs_reversed),
)
