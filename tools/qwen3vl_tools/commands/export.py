"""`qwen3vl-export export`: a checkpoint to a bundle."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_export.contract import COMPONENTS, TARGETS
from qwen3vl_tools.extras import needs_extra

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser"]


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "export",
        help="export a checkpoint to a bundle of ONNX graphs",
        description="Export a Qwen3-VL checkpoint. The model is never loaded: weights are "
        "streamed one tensor at a time.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="checkpoint folder, or a Hugging Face model id")
    parser.add_argument("--output", type=Path, required=True, help="bundle folder to create")
    parser.add_argument(
        "--target", choices=tuple(TARGETS), default="onnx", help="default: %(default)s"
    )
    parser.add_argument(
        "--precision",
        choices=tuple(dict.fromkeys(name for names in TARGETS.values() for name in names)),
        help="default: "
        + ", ".join(f"{names[0]} for {target}" for target, names in TARGETS.items()),
    )
    parser.add_argument(
        "--prefill-precision",
        choices=("int8",),
        help="add a second decoder graph, faster on prompts, to an int8 or int4 bundle",
    )
    parser.add_argument(
        "--components",
        type=lambda text: tuple(text.split(",")),
        default=COMPONENTS,
        metavar="NAMES",
        help=f"comma-separated, of {','.join(COMPONENTS)} (default: all)",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing bundle")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    with needs_extra("`export`", "export"):
        from qwen3vl_export.pipeline import ExportOptions, export_bundle
    options = ExportOptions(
        checkpoint=args.checkpoint,
        output=args.output,
        target=args.target,
        precision=args.precision or TARGETS[args.target][0],
        prefill_precision=args.prefill_precision,
        components=args.components,
        force=args.force,
    )
    bundle = export_bundle(options)
    for component in bundle.manifest.components.values():
        print(f"{component.name:<10} {component.size / 1e6:10.1f} MB  {component.file}")
    print(bundle.path)
    return 0
