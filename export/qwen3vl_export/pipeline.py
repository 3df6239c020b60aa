"""From a checkpoint to a bundle: the steps in order."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from tqdm import tqdm

from qwen3vl_export.bundle import PROCESSOR, Bundle, BundleFile, Component, Manifest
from qwen3vl_export.bundle_writer import BundleWriter
from qwen3vl_export.checkpoint import Checkpoint, check_weights, read_json
from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import COMPONENTS, PRECISIONS, TARGETS
from qwen3vl_export.errors import CheckpointError, ExportError
from qwen3vl_export.graph import trace_component
from qwen3vl_export.modules import weight_sources
from qwen3vl_export.weights import weight_bytes, write_weights

__all__ = ["ExportOptions", "export_bundle"]

logger = logging.getLogger(__name__)

_REQUIRED_PROCESSOR_FILES = ("tokenizer.json", "tokenizer_config.json")
_OPTIONAL_PROCESSOR_FILES = ("chat_template.jinja", "chat_template.json", "generation_config.json")
#: File of the bundle -> key under which transformers 5.x nests it in processor_config.json.
_PREPROCESSOR_FILES = {
    "preprocessor_config.json": "image_processor",
    "video_preprocessor_config.json": "video_processor",
}
_TRACED_WITH = ("torch", "onnx", "onnxscript", "onnx-ir")


@dataclass(frozen=True)
class ExportOptions:
    """What to export, and where to."""

    checkpoint: str
    output: Path
    target: str = "onnx"
    precision: str = "fp16"
    components: tuple[str, ...] = COMPONENTS
    force: bool = False

    def __post_init__(self) -> None:
        """Refuse values that name nothing; raises ExportError."""
        for value, known, flag in (
            (self.target, TARGETS, "--target"),
            (self.precision, tuple(PRECISIONS), "--precision"),
            *((component, COMPONENTS, "--components") for component in self.components),
        ):
            if value not in known:
                raise ExportError(f"{flag} must be one of {', '.join(known)}, found {value!r}")
        if not self.components:
            raise ExportError(f"--components must name at least one of {', '.join(COMPONENTS)}")


def export_bundle(options: ExportOptions) -> Bundle:
    """Export a checkpoint to a bundle without ever loading the model.

    Raises:
        CheckpointError: The checkpoint is missing, incomplete or inconsistent.
        UnsupportedModelError: It is not a dense, unquantised Qwen3-VL.
        ExportError: The output exists, the disk is full, or a weight overflows the precision.
    """
    checkpoint = Checkpoint.open(options.checkpoint)
    config = ModelConfig.from_dict(checkpoint.config)
    check_weights(checkpoint, config)
    total = sum(
        weight_bytes(weight_sources(component, config), options.precision)
        for component in options.components
    )
    with _writing(options.output), BundleWriter(options.output, force=options.force) as writer:
        writer.require_space(total)
        processor_files = _copy_processor(checkpoint.folder, writer.folder)
        with tqdm(total=total, unit="B", unit_scale=True, disable=None) as progress:
            components = {
                name: _export_component(name, config, checkpoint, options, writer.folder, progress)
                for name in options.components
            }
        manifest = Manifest(
            target=options.target,
            precision=options.precision,
            model=checkpoint.config,
            components=components,
            processor_files=processor_files,
            source=checkpoint.source,
            tool_versions=_tool_versions(),
        )
        return writer.commit(manifest)


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Say in a sentence that the disk is full or not writable."""
    try:
        yield
    except OSError as error:
        raise ExportError(
            f"writing {output} failed: {error.strerror or error}; nothing was written there"
        ) from error


def _export_component(
    name: str,
    config: ModelConfig,
    checkpoint: Checkpoint,
    options: ExportOptions,
    folder: Path,
    progress: tqdm,
) -> Component:
    progress.set_description(f"{name}: tracing")
    graph = trace_component(name, config, options.precision)
    progress.set_description(f"{name}: writing weights")
    data = write_weights(
        graph,
        weight_sources(name, config),
        checkpoint,
        options.precision,
        folder / f"{name}.onnx.data",
        progress.update,
    )
    ir.save(graph.model, folder / f"{name}.onnx")
    return Component(
        name=name,
        file=f"{name}.onnx",
        files=(BundleFile.of(folder, f"{name}.onnx"), data),
        inputs=graph.contract.inputs,
        outputs=graph.contract.outputs,
    )


def _copy_processor(checkpoint: Path, bundle: Path) -> tuple[BundleFile, ...]:
    """Copy what preprocessing and tokenising need; returns the bundle's entries for it."""
    target = bundle / PROCESSOR
    target.mkdir()
    for name in (*_REQUIRED_PROCESSOR_FILES, *_OPTIONAL_PROCESSOR_FILES):
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, target / name)
        elif name in _REQUIRED_PROCESSOR_FILES:
            raise CheckpointError(
                f"{checkpoint} has no {name}; add the tokenizer and processor files of the model "
                "it was trained from"
            )
    for name, key in _PREPROCESSOR_FILES.items():
        _copy_preprocessor(checkpoint, target / name, key)
    names = sorted(path.name for path in target.iterdir())
    return tuple(BundleFile.of(bundle, f"{PROCESSOR}/{name}") for name in names)


def _copy_preprocessor(checkpoint: Path, target: Path, key: str) -> None:
    """Copy a preprocessor config, from its own file or from inside processor_config.json."""
    own, nested = checkpoint / target.name, checkpoint / "processor_config.json"
    config = read_json(own) if own.is_file() else None
    if config is None and nested.is_file():
        config = read_json(nested).get(key)
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{checkpoint} has neither {target.name} nor a {key!r} entry in processor_config.json"
        )
    target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _tool_versions() -> dict[str, str]:
    names = ("qwen3vl-export", *_TRACED_WITH)
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed as a package"
    return versions
