"""Every wiring is cut on purpose: the intact bundle agrees with transformers, the cut one must not.

A wiring whose cut changes nothing would be one that the parity tests cannot vouch for. Logits here
have a standard deviation of about 4, and a cut moves some of them by more than `CUT`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.conversations import CONVERSATIONS, image, user, varied, video
from tests.parity.logits import decode_logits, largest_difference, prompt_logits, random_answer
from tests.parity.reference import edited_levels
from tests.tolerances import LOGITS
from torch import Tensor

from qwen3vl_runtime import ORTRunner
from qwen3vl_runtime.positions import RopeIndex
from qwen3vl_runtime.preprocess import PreparedPrompt
from qwen3vl_runtime.vision_model import EncodedVisuals
from qwen3vl_tools.reference import Reference

Runners = Callable[..., ORTRunner]
References = Callable[[str], Reference]

#: Least change of some logit when a wiring is cut; ten thousand times the fp32 tolerance.
CUT = 1.0
#: Where DeepStack features enter: one level for each of these is the most of any shape.
DEEPSTACK_SHAPES = {"trained": 3, "tied": 3, "untied-head72": 3, "four-levels": 4, "one-layer": 1}
TWO_IMAGES = user(image(90), "and", image(91), "Which is larger?")
VIDEO = user(video(92, 6), "What moves?")
MIXED = CONVERSATIONS["turns with images and a video"]
ENDLESS = varied(24)


def _intact(
    runtime: ORTRunner, truth: Reference, messages: list[dict[str, Any]]
) -> tuple[PreparedPrompt, np.ndarray]:
    """A prompt and its logits, after checking that these are those of transformers."""
    prompt = runtime.preprocessor.prepare(messages)
    logits = prompt_logits(runtime, prompt)
    assert largest_difference(logits, truth.logits(messages).numpy()) < LOGITS["fp32"]
    return prompt, logits


def _without(features: EncodedVisuals, levels: Sequence[int]) -> EncodedVisuals:
    deepstack = features.deepstack.copy()
    deepstack[list(levels)] = 0
    return replace(features, deepstack=deepstack)


@pytest.mark.parametrize("name", DEEPSTACK_SHAPES)
def test_deepstack_reaches_the_logits(name: str, runner: Runners, reference: References) -> None:
    prompt, logits = _intact(runner(name), reference(name), MIXED)
    features = runner(name).encode([prompt])
    assert len(features.deepstack) == DEEPSTACK_SHAPES[name]
    cut = _without(features, range(DEEPSTACK_SHAPES[name]))
    assert largest_difference(prompt_logits(runner(name), prompt, cut), logits) > CUT


@pytest.mark.parametrize(
    ("name", "level"),
    [(name, level) for name, levels in DEEPSTACK_SHAPES.items() for level in range(levels)],
)
def test_each_deepstack_level_reaches_the_logits(
    name: str, level: int, runner: Runners, reference: References
) -> None:
    prompt, logits = _intact(runner(name), reference(name), MIXED)
    cut = _without(runner(name).encode([prompt]), [level])
    changed = prompt_logits(runner(name), prompt, cut)
    assert largest_difference(changed, logits) > CUT
    # Nothing before the first picture may change: it cannot see one.
    first = int(np.flatnonzero(prompt.layout.visual_indices >= 0)[0])
    assert largest_difference(changed[:first], logits[:first]) < LOGITS["fp32"]


def _one_layer_late(levels: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(levels[0]), *levels]


def _one_layer_early(levels: list[Tensor]) -> list[Tensor]:
    return levels[1:]


def _reversed(levels: list[Tensor]) -> list[Tensor]:
    return levels[::-1]


def _at_vision_layers(levels: list[Tensor]) -> list[Tensor]:
    """After decoder layers 0, 2 and 3: the indexes of the vision layers of "tied"."""
    return [levels[0], torch.zeros_like(levels[0]), levels[1], levels[2]]


@pytest.mark.parametrize(
    ("name", "miswire"),
    [
        *((name, _one_layer_late) for name in ("trained", "tied", "four-levels")),
        *((name, _one_layer_early) for name in ("trained", "tied", "four-levels")),
        *((name, _reversed) for name in ("trained", "tied", "four-levels")),
        ("tied", _at_vision_layers),
    ],
)
def test_deepstack_enters_after_its_own_layer(
    name: str,
    miswire: Callable[[list[Tensor]], list[Tensor]],
    runner: Runners,
    reference: References,
) -> None:
    """Transformers itself, wired wrongly, disagrees with the bundle; wired rightly, it agrees."""
    _, logits = _intact(runner(name), reference(name), MIXED)
    with edited_levels(reference(name), miswire):
        wrong = reference(name).logits(MIXED).numpy()
    assert largest_difference(logits, wrong) > CUT
    with edited_levels(reference(name), list):
        right = reference(name).logits(MIXED).numpy()
    assert largest_difference(logits, right) < LOGITS["fp32"]


@pytest.mark.parametrize("name", ["trained", "tied", "untied-head72", "four-levels"])
def test_every_axis_of_the_positions_matters(
    name: str, runner: Runners, reference: References
) -> None:
    prompt, logits = _intact(runner(name), reference(name), MIXED)
    line = np.tile(np.arange(prompt.num_tokens), (3, 1))
    for axes in ([0, 1, 2], [0], [1], [2]):
        positions = prompt.rope.position_ids.copy()
        positions[axes] = line[axes]
        cut = replace(prompt, rope=RopeIndex(positions, 0))
        assert largest_difference(prompt_logits(runner(name), cut), logits) > CUT
    transposed = prompt.rope._replace(position_ids=prompt.rope.position_ids[[0, 2, 1]])
    swapped = replace(prompt, rope=transposed)
    assert largest_difference(prompt_logits(runner(name), swapped), logits) > CUT


@pytest.mark.parametrize("name", ["trained", "tied"])
def test_answers_go_on_at_the_position_after_the_picture(
    name: str, runner: Runners, reference: References
) -> None:
    answer = random_answer(seed=7, steps=16)
    prompt = runner(name).preprocessor.prepare(MIXED)
    assert prompt.rope.rope_delta != 0
    expected = reference(name).logits(MIXED, answer).numpy()[-17:]
    actual = decode_logits(runner(name), [prompt], np.array([answer]))[0]
    assert largest_difference(actual, expected) < LOGITS["fp32"]
    cut = replace(prompt, rope=prompt.rope._replace(rope_delta=0))
    wrong = decode_logits(runner(name), [cut], np.array([answer]))[0]
    assert largest_difference(wrong[:1], expected[:1]) < LOGITS["fp32"]
    assert largest_difference(wrong, expected) > CUT / 2


@pytest.mark.parametrize("name", ["trained", "tied", "no-deepstack", "one-layer"])
def test_images_keep_their_order(name: str, runner: Runners, reference: References) -> None:
    prompt, logits = _intact(runner(name), reference(name), TWO_IMAGES)
    first, second = runner(name).vision.encode(prompt.visuals)
    cut = EncodedVisuals.concatenate([second, first])
    wrong = prompt_logits(runner(name), prompt, cut)
    assert largest_difference(wrong, logits) > CUT
    # The swap is exactly what asking with the images swapped gives.
    content = TWO_IMAGES[0]["content"]
    turned = [{"role": "user", "content": [content[2], content[1], content[0], content[3]]}]
    _, expected = _intact(runner(name), reference(name), turned)
    assert largest_difference(wrong, expected) < LOGITS["fp32"]


@pytest.mark.parametrize("name", ["trained", "tied", "no-deepstack", "one-layer"])
def test_video_frames_keep_their_order(name: str, runner: Runners, reference: References) -> None:
    prompt, logits = _intact(runner(name), reference(name), VIDEO)
    (visual,) = prompt.visuals
    cut = replace(prompt, visuals=(replace(visual, pixel_values=visual.pixel_values[::-1]),))
    assert largest_difference(prompt_logits(runner(name), cut), logits) > CUT
    frames = VIDEO[0]["content"][0]["video"]
    part = VIDEO[0]["content"][0] | {"video": [frames[i] for i in (4, 5, 2, 3, 0, 1)]}
    _, expected = _intact(runner(name), reference(name), user(part, "What moves?"))
    assert largest_difference(prompt_logits(runner(name), cut), expected) < LOGITS["fp32"]
    # Within one temporal patch as well: frames 0 and 1 exchanged.
    part = VIDEO[0]["content"][0] | {"video": [frames[i] for i in (1, 0, 2, 3, 4, 5)]}
    _, exchanged = _intact(runner(name), reference(name), user(part, "What moves?"))
    assert largest_difference(exchanged, logits) > CUT


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["trained", "four-levels"])
def test_nan_left_in_the_cache_changes_nothing(name: str, precision: str, runner: Runners) -> None:
    runtime = runner(name, precision)
    answer = np.array([random_answer(seed=8, steps=4)] * 2)
    conversations = (CONVERSATIONS["text"], MIXED)

    def ask() -> tuple[np.ndarray, list[tuple[int, ...]]]:
        prompts = [runtime.preprocessor.prepare(messages) for messages in conversations]
        logits = decode_logits(runtime, prompts, answer, chunk=17)
        results = runtime.generate_batch(conversations, ENDLESS)
        return logits, [result.token_ids for result in results]

    logits, tokens = ask()
    assert np.isfinite(logits).all()
    for view in _all_slots(runtime).values():
        view.fill(np.nan)
    logits_after, tokens_after = ask()
    assert np.array_equal(logits_after, logits)
    assert tokens_after == tokens


def _all_slots(runtime: ORTRunner) -> dict[str, np.ndarray]:
    cache = runtime.text.cache
    cache.begin(cache.max_batch, cache.capacity)
    return cache.inputs


@pytest.mark.parametrize(
    ("name", "precision"),
    [*itertools.product(("trained", "four-levels"), ("fp32", "fp16")), ("no-deepstack", "fp32")],
)
def test_nan_in_unused_visual_rows_changes_nothing(
    name: str, precision: str, runner: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = runner(name, precision)
    poison = EncodedVisuals(
        np.full_like(runtime.text.no_visuals.embeds, np.nan),
        np.full_like(runtime.text.no_visuals.deepstack, np.nan),
    )
    prompt = runtime.preprocessor.prepare(MIXED)
    features = runtime.encode([prompt])
    answer = np.array([random_answer(seed=9, steps=4)])
    logits = prompt_logits(runtime, prompt, features)
    decoded = decode_logits(runtime, [prompt], answer)
    text = runtime.generate(CONVERSATIONS["text"], ENDLESS)

    padded = EncodedVisuals.concatenate([features, poison])
    assert np.array_equal(prompt_logits(runtime, prompt, padded), logits)
    monkeypatch.setattr(runtime.text, "no_visuals", poison)
    assert np.array_equal(decode_logits(runtime, [prompt], answer), decoded)
    assert runtime.generate(CONVERSATIONS["text"], ENDLESS).token_ids == text.token_ids


@pytest.mark.parametrize("name", ["trained", "four-levels", "no-deepstack"])
def test_nan_in_one_row_of_a_batch_stays_there(
    name: str, runner: Runners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text positions read visual row 0 before it is discarded; here that row holds NaN."""
    runtime = runner(name)
    prompts = [runtime.preprocessor.prepare(each) for each in (CONVERSATIONS["text"], MIXED)]
    answers = np.array([random_answer(seed=10, steps=4)] * 2)
    logits = decode_logits(runtime, prompts, answers)
    features = runtime.encode(prompts)
    poison = EncodedVisuals(
        np.full_like(features.embeds, np.nan), np.full_like(features.deepstack, np.nan)
    )
    monkeypatch.setattr(runtime, "encode", lambda prompts: poison)
    poisoned = decode_logits(runtime, prompts, answers)
    assert np.array_equal(poisoned[0], logits[0])
    assert np.isnan(poisoned[1]).all()
