"""The trained checkpoint answers held-out questions as it does in transformers, one by one.

Also the canaries' last word: with a wiring cut, right answers become wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from qwen3vl_runtime import ORTRunner, SamplingParams
from qwen3vl_runtime.image_processor import VisualInput
from qwen3vl_runtime.positions import RopeIndex
from qwen3vl_runtime.preprocess import PreparedPrompt
from qwen3vl_runtime.runner import Messages
from qwen3vl_runtime.vision_model import EncodedVisuals
from qwen3vl_tools.reference import Reference
from qwen3vl_tools.tiny.accuracy import accuracy, held_out_all
from qwen3vl_tools.tiny.conversation import as_messages
from qwen3vl_tools.tiny.samples import Sample
from qwen3vl_tools.tiny.scenes import KINDS, held_out

Runners = Callable[..., ORTRunner]
References = Callable[[str], Reference]

SEED = 20_260
COUNT = 8
MAX_NEW_TOKENS = 48
PARAMS = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, temperature=0)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_equal_transformers(kind: str, runner: Runners, reference: References) -> None:
    samples = held_out(kind, COUNT, SEED)
    truth = reference("trained")
    ours = [_ask(runner("trained"), sample) for sample in samples]
    theirs = [
        truth.tokenizer.decode(
            truth.generate(as_messages(sample), MAX_NEW_TOKENS), skip_special_tokens=True
        )
        for sample in samples
    ]
    assert ours == theirs


def test_most_answers_are_right(runner: Runners) -> None:
    counts = accuracy(lambda sample: _ask(runner("trained"), sample), held_out_all(COUNT, SEED))
    assert {total for _, total in counts.values()} == {COUNT}
    assert sum(right for right, _ in counts.values()) >= 0.9 * COUNT * len(KINDS)


@pytest.mark.parametrize(
    ("cut", "kinds", "kept"),
    [
        ("deepstack", ("color", "move", "vcolor"), 0.5),
        # Text and small grids stand nearly alike in a line, so fewer answers turn.
        ("positions", ("describe", "pos", "which"), 0.85),
        ("images", ("which", "color2"), 0.5),
        ("frames", ("order",), 0.5),
    ],
)
def test_a_cut_wiring_makes_right_answers_wrong(
    cut: str,
    kinds: tuple[str, ...],
    kept: float,
    runner: Runners,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the right answers to these kinds of question, at most the share `kept` stays right."""
    runtime = runner("trained")
    samples = [sample for kind in kinds for sample in held_out(kind, COUNT, SEED)]
    right = [sample for sample in samples if _ask(runtime, sample) == sample.answer]
    assert len(right) >= len(samples) / 2
    _CUTS[cut](runtime, monkeypatch)
    still_right = [sample for sample in right if _ask(runtime, sample) == sample.answer]
    assert len(still_right) <= kept * len(right)


def _cut_deepstack(runtime: ORTRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = runtime.encode

    def cut(prompts: Sequence[PreparedPrompt]) -> EncodedVisuals:
        features = encode(prompts)
        return replace(features, deepstack=np.zeros_like(features.deepstack))

    monkeypatch.setattr(runtime, "encode", cut)


def _cut_positions(runtime: ORTRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = runtime.preprocessor.prepare

    def cut(messages: Messages) -> PreparedPrompt:
        prompt = prepare(messages)
        line = np.tile(np.arange(prompt.num_tokens), (3, 1))
        return replace(prompt, rope=RopeIndex(line, 0))

    monkeypatch.setattr(runtime.preprocessor, "prepare", cut)


def _cut_images(runtime: ORTRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = runtime.vision.encode
    monkeypatch.setattr(runtime.vision, "encode", lambda visuals: encode(visuals)[::-1])


def _cut_frames(runtime: ORTRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = runtime.vision.encode

    def cut(visuals: Sequence[VisualInput]) -> list[EncodedVisuals]:
        return encode([replace(each, pixel_values=each.pixel_values[::-1]) for each in visuals])

    monkeypatch.setattr(runtime.vision, "encode", cut)


_CUTS: dict[str, Callable[[ORTRunner, pytest.MonkeyPatch], None]] = {
    "deepstack": _cut_deepstack,
    "positions": _cut_positions,
    "images": _cut_images,
    "frames": _cut_frames,
}


def _ask(runner: ORTRunner, sample: Sample) -> str:
    return runner.generate(as_messages(sample), PARAMS).text.strip()
