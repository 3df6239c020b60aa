"""Measures a tiny checkpoint: accuracy by kind, what it depends on, and what INT8 costs.

Answers are judged by teacher forcing: right means that greedy decoding would have said exactly
this answer and then stopped. KL is of the answer tokens' distributions against the intact model.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3VLForConditionalGeneration

from qwen3vl_tools.tiny import CHECKPOINT_DIR
from qwen3vl_tools.tiny.ablations import ABLATIONS, INTACT, Ablation
from qwen3vl_tools.tiny.accuracy import held_out_all
from qwen3vl_tools.tiny.batching import Batch, collate
from qwen3vl_tools.tiny.encoding import IGNORED, Codec, as_picture
from qwen3vl_tools.tiny.forward import answer_logits, encode
from qwen3vl_tools.tiny.int8 import naive_w8a8
from qwen3vl_tools.tiny.outliers import write_outlier_variant
from qwen3vl_tools.tiny.scenes import KINDS, Sample

__all__ = ["Subject", "Verdict", "judge", "load"]

_BATCH = 50
_CALIBRATION_SEED = 77
_CALIBRATION_COUNT = 6  # of each kind


@dataclass(frozen=True)
class Subject:
    """A model under test, with the encoder of its inputs."""

    model: Qwen3VLForConditionalGeneration
    codec: Codec

    def batches(self, samples: Sequence[Sample]) -> Iterator[Batch]:
        """The samples as batches, one question a row."""
        config = self.model.config
        for first in range(0, len(samples), _BATCH):
            rows = []
            for sample in samples[first : first + _BATCH]:
                picture, question = as_picture(sample)
                rows.append(self.codec.row(picture, [question]))
            yield collate(rows, (config.image_token_id, config.video_token_id))


@dataclass(frozen=True)
class Verdict:
    """What a model answered.

    Attributes:
        counts: (right, total) by kind.
        log_probs: (num_answer_tokens, vocab) of all samples.
    """

    counts: dict[str, tuple[int, int]]
    log_probs: Tensor = field(repr=False)


def load(checkpoint: Path) -> Subject:
    """Reads a checkpoint folder, to compute in float32."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, local_files_only=True
    )
    model.requires_grad_(False)
    return Subject(model, Codec(checkpoint))


@torch.no_grad()
def judge(subject: Subject, samples: Sequence[Sample], ablation: Ablation = INTACT) -> Verdict:
    """Asks all samples under an ablation."""
    counts: dict[str, tuple[int, int]] = {}
    log_probs = []
    changed = [ablation.sample(sample) for sample in samples]
    for index, whole in enumerate(subject.batches(changed)):
        batch = ablation.batch(whole)
        features = ablation.features(encode(subject.model, batch))
        logits, _ = answer_logits(subject.model, batch, features)
        log_probs.append(functional.log_softmax(logits, -1))
        said = torch.full_like(batch.labels, IGNORED)
        said[batch.labels != IGNORED] = logits.argmax(-1)
        is_right = (said == batch.labels).all(1)
        for sample, right in zip(samples[index * _BATCH :], is_right.tolist(), strict=False):
            before, total = counts.get(sample.kind, (0, 0))
            counts[sample.kind] = (before + right, total + 1)
    return Verdict(counts, torch.cat(log_probs))


def _line(name: str, verdict: Verdict, reference: Verdict | None = None) -> str:
    cells = []
    for kind in KINDS:
        right, total = verdict.counts.get(kind, (0, 0))
        cells.append(f"{100 * right / total:.1f}" if total else "-")
    same_size = reference is not None and len(reference.log_probs) == len(verdict.log_probs)
    divergence = f"{_divergence(reference, verdict):.4f}" if reference and same_size else "-"
    return f"| {name} | {' | '.join(cells)} | {divergence} |"


def _divergence(reference: Verdict, other: Verdict) -> float:
    """KL(reference || other), mean over answer tokens."""
    return float(
        functional.kl_div(
            other.log_probs, reference.log_probs, log_target=True, reduction="batchmean"
        )
    )


def _print_ablations(subject: Subject, samples: list[Sample], intact: Verdict) -> None:
    for ablation in ABLATIONS:
        asked = [s for s in samples if not ablation.kinds or s.kind in ablation.kinds]
        reference = None if ablation.kinds else intact
        print(_line(ablation.name, judge(subject, asked, ablation), reference))


def _print_int8(subject: Subject, checkpoint: Path, samples: list[Sample], base: Verdict) -> None:
    calibration = list(subject.batches(held_out_all(_CALIBRATION_COUNT, _CALIBRATION_SEED)))
    quantized = Subject(naive_w8a8(subject.model, calibration), subject.codec)
    print(_line("naive W8A8", judge(quantized, samples), base))
    with tempfile.TemporaryDirectory() as folder:
        variant = Path(folder) / "outliers"
        write_outlier_variant(checkpoint, variant)
        planted = load(variant)
    print(_line("outlier variant, float", judge(planted, samples), base))
    quantized = Subject(naive_w8a8(planted.model, calibration), planted.codec)
    print(_line("outlier variant, naive W8A8", judge(quantized, samples), base))


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=CHECKPOINT_DIR)
    parser.add_argument("--count", type=int, default=300, help="held-out samples of each kind")
    parser.add_argument("--seed", type=int, default=20261201, help="of the held-out samples")
    parser.add_argument("--accuracy-only", action="store_true", help="skip ablations and INT8")
    arguments = parser.parse_args()
    subject = load(arguments.checkpoint)
    samples = held_out_all(arguments.count, arguments.seed)
    print(f"| % right | {' | '.join(KINDS)} | KL |")
    print(f"|---|{'---|' * (len(KINDS) + 1)}")
    intact = judge(subject, samples)
    print(_line("intact", intact))
    if not arguments.accuracy_only:
        _print_ablations(subject, samples, intact)
        _print_int8(subject, arguments.checkpoint, samples, intact)


if __name__ == "__main__":
    _main()
