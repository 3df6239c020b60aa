"""What a runner refuses before it works, and when it is free again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qwen3vl_export.errors import InputError
from qwen3vl_runtime import ORTRunner, SamplingParams
from qwen3vl_runtime.image_processor import VisualInput
from qwen3vl_runtime.vision_model import EncodedVisuals, VisionModel

MESSAGES = [{"role": "user", "content": "What color?"}]
GREEDY = SamplingParams(max_new_tokens=4, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("params", [{"max_new_tokens": 4}, "greedy", [None], [{}], 4])
def test_params_of_another_type_are_refused(runner: Callable[..., ORTRunner], params: Any) -> None:
    with pytest.raises(InputError, match="params must be SamplingParams"):
        runner("trained").generate(MESSAGES, params)
    with pytest.raises(InputError, match="params must be SamplingParams"):
        next(iter(runner("trained").stream(MESSAGES, params)))


@pytest.mark.parametrize("make", [lambda: None, lambda: iter([MESSAGES]), lambda: "hi", dict])
def test_conversations_must_be_a_list(runner: Callable[..., ORTRunner], make: Any) -> None:
    with pytest.raises(InputError, match="conversations must be a list"):
        runner("trained").generate_batch(make())


def test_the_runner_is_free_when_the_last_chunk_is_given_out(
    runner: Callable[..., ORTRunner],
) -> None:
    stream = runner("trained").stream(MESSAGES, GREEDY)
    last = next(chunk for chunk in stream if chunk.finish_reason is not None)
    answer = runner("trained").generate(MESSAGES, GREEDY)  # while `stream` is still referenced
    assert last.result is not None
    assert last.result.token_ids == answer.token_ids
    assert next(iter(stream), None) is None


@pytest.mark.filterwarnings("error")
def test_features_beyond_the_range_of_the_bundle_are_refused(
    runner: Callable[..., ORTRunner],
) -> None:
    config = runner("trained").bundle.config
    width = config.text.hidden_size * (1 + config.num_deepstack_levels)
    features = np.full((4, width), 1e6, np.float32)
    half = np.dtype(np.float16)
    with pytest.raises(InputError, match="must fit into the bundle's float16"):
        EncodedVisuals.from_features(features, config, half)
    assert EncodedVisuals.from_features(features / 1e3, config, half).embeds.dtype == half


@pytest.mark.filterwarnings("error")
def test_pixels_beyond_the_range_of_the_bundle_are_no_warning(
    runner: Callable[..., ORTRunner],
) -> None:
    """An odd image_std makes them; the infinite logits are the error, and the only one."""
    config = runner("trained").bundle.config
    hidden, levels = config.text.hidden_size, config.num_deepstack_levels
    fed = {}

    class OneToken:
        def run(self, feed: dict[str, np.ndarray], outputs: Any = None) -> dict[str, np.ndarray]:
            fed.update(feed)
            return {
                "image_embeds": np.zeros((1, 1, hidden), np.float16),
                "deepstack_embeds": np.zeros((levels, 1, 1, hidden), np.float16),
            }

    pixels = np.full((1, config.vision.merge_unit, config.vision.patch_dim), 1e6, np.float32)
    side = config.vision.spatial_merge_size
    VisionModel(OneToken(), config, np.dtype(np.float16)).encode(
        [VisualInput(pixels, (1, side, side))]
    )
    assert np.isinf(fed["pixel_values"]).all()
