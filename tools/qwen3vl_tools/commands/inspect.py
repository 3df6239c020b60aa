"""`qwen3vl-export inspect`: what a bundle holds, every hash checked."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_export.bundle import Bundle, Component
from qwen3vl_export.config import ModelConfig

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add_parser"]


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "inspect",
        help="show a bundle's components, I/O and config, and check its hashes",
        description="Validate a bundle and show what it holds.",
        allow_abbrev=False,
    )
    parser.add_argument("bundle", type=Path, help="bundle folder")
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    bundle = Bundle.open(args.bundle)
    if args.json:
        print(json.dumps(bundle.manifest.to_dict(), indent=2))
    else:
        print("\n".join(_lines(bundle)))
    return 0


def _lines(bundle: Bundle) -> Iterator[str]:
    manifest = bundle.manifest
    yield f"bundle     {bundle.path}"
    yield f"source     {manifest.source}"
    yield f"target     {manifest.target}, {manifest.precision}"
    yield "made by    " + ", ".join(f"{k} {v}" for k, v in manifest.tool_versions.items())
    yield from _config_lines(bundle.config)
    for component in manifest.components.values():
        yield ""
        yield from _component_lines(component)
    yield ""
    size = sum(file.size for file in manifest.files)
    yield f"all {len(manifest.files)} files ({size / 1e6:,.1f} MB) match their SHA-256"


def _config_lines(config: ModelConfig) -> Iterator[str]:
    text, vision = config.text, config.vision
    tied = "tied" if config.tie_word_embeddings else "untied"
    yield (
        f"decoder    {text.num_hidden_layers} layers, hidden {text.hidden_size}, "
        f"{text.num_attention_heads}/{text.num_key_value_heads} heads of {text.head_dim}, "
        f"vocabulary {text.vocab_size} ({tied})"
    )
    yield (
        f"vision     {vision.depth} layers, hidden {vision.hidden_size}, {vision.num_heads} heads "
        f"of {vision.head_dim}, DeepStack after {list(vision.deepstack_visual_indexes)}"
    )


def _component_lines(component: Component) -> Iterator[str]:
    files = ", ".join(f"{file.path} {file.size / 1e6:,.1f} MB" for file in component.files)
    yield f"{component.name}: {files}"
    for direction, specs in (("in ", component.inputs), ("out", component.outputs)):
        for spec in specs:
            shape = ", ".join(str(dim) for dim in spec.shape)
            yield f"  {direction} {spec.name:<28} {spec.dtype:<9} [{shape}]"
