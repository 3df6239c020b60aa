"""`qwen3vl-export demo`: the whole way on the bundled checkpoint, checked against transformers."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_tools.extras import needs_extra
from qwen3vl_tools.tiny import CHECKPOINT_DIR

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser"]

_MAX_NEW_TOKENS = 48


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="export the bundled tiny checkpoint, ask it questions, compare with transformers",
        description="Export the bundled tiny checkpoint (fp32), ask it questions about drawn "
        "images and short videos, and compare every answer, token by token, with Hugging Face "
        "transformers. Works offline.",
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=Path, help="keep the bundle in this folder")
    parser.add_argument("--seed", type=int, default=7, help="of the drawn questions")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.output is not None:
        return _demo(args.output, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        return _demo(Path(folder) / "bundle", args.seed)


def _demo(output: Path, seed: int) -> int:
    with needs_extra("`demo`", "export"):
        from qwen3vl_export.pipeline import ExportOptions, export_bundle
        from qwen3vl_tools.reference import Reference
    with needs_extra("`demo`", "cpu"):
        from qwen3vl_runtime import ORTRunner, SamplingParams
    from qwen3vl_tools.tiny.conversation import as_messages
    from qwen3vl_tools.tiny.scenes import KINDS, held_out

    print(f"exporting {CHECKPOINT_DIR}", file=sys.stderr)
    bundle = export_bundle(ExportOptions(str(CHECKPOINT_DIR), output, precision="fp32"))
    runner = ORTRunner(bundle)
    reference = Reference(CHECKPOINT_DIR)
    samples = [sample for kind in KINDS for sample in held_out(kind, 1, seed)]
    num_equal = 0
    for sample in samples:
        messages = as_messages(sample)
        params = SamplingParams(max_new_tokens=_MAX_NEW_TOKENS, temperature=0)
        result = runner.generate(messages, params)
        expected = reference.generate(messages, _MAX_NEW_TOKENS)
        is_equal = list(result.token_ids) == expected
        num_equal += is_equal
        what = "video " if sample.video else f"{len(sample.images)} image"
        verdict = "=" if is_equal else f"!= {reference.tokenizer.decode(expected)!r}"
        print(f"[{what}] {sample.question} -> {result.text} {verdict}")
    print(f"{num_equal} of {len(samples)} answers equal transformers")
    return 0 if num_equal == len(samples) else 1
