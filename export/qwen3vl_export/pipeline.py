"""From a checkpoint to a bundle: the steps in order."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
import tokenizers
from tqdm import tqdm

from qwen3vl_export.bundle import PROCESSOR, Bundle, BundleFile, Component, Manifest
from qwen3vl_export.bundle_writer import BundleWriter
from qwen3vl_export.checkpoint import Checkpoint, check_weights, read_json
from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import COMPONENTS, TARGETS
from qwen3vl_export.errors import CheckpointError, ExportError
from qwen3vl_export.graph import trace_component
from qwen3vl_export.lowering import lower_for_ort
from qwen3vl_export.modules import weight_sources
from qwen3vl_export.recipes import ComponentPlan, component_plans
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
#: What transformers takes for a patch size that the file of the bundle leaves out.
_DEFAULT_PATCH_SIZES = {"preprocessor_config.json": 14, "video_preprocessor_config.json": 16}
_TRACED_WITH = ("torch", "onnx", "onnxscript", "onnx-ir")


@dataclass(frozen=True)
class ExportOptions:
    """What to export, and where to."""

    checkpoint: str
    output: Path
    target: str = "onnx"
    precision: str = "fp16"
    prefill_precision: str | None = None
    components: tuple[str, ...] = COMPONENTS
    force: bool = False

    def __post_init__(self) -> None:
        """Refuse values that name nothing; raises ExportError."""
        precisions = TARGETS.get(self.target, ())
        for value, known, flag in (
            (self.target, tuple(TARGETS), "--target"),
            (self.precision, precisions, f"--precision of target {self.target}"),
            *((component, COMPONENTS, "--components") for component in self.components),
        ):
            if value not in known:
                raise ExportError(f"{flag} must be one of {', '.join(known)}, found {value!r}")
        if self.prefill_precision is not None and (
            self.prefill_precision != "int8" or self.precision not in ("int8", "int4")
        ):
            raise ExportError(
                "--prefill-precision int8 goes with --target ort-cpu --precision int8 or int4, "
                f"found {self.prefill_precision!r} with {self.precision}"
            )
        if not self.components:
            raise ExportError(f"--components must name at least one of {', '.join(COMPONENTS)}")
        if len(set(self.components)) < len(self.components):
            raise ExportError(
                f"--components must name each component once, found {','.join(self.components)}"
            )


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
    plans = component_plans(
        options.components, options.target, options.precision, options.prefill_precision
    )
    total = sum(
        weight_bytes(weight_sources(plan.component, config), options.precision, plan.choose)
        for plan in plans
    )
    _check_apart(checkpoint.folder, options.output)
    with _writing(options.output), BundleWriter(options.output, force=options.force) as writer:
        writer.require_space(total)
        processor_files = _copy_processor(checkpoint.folder, writer.folder, config)
        with tqdm(total=total, unit="B", unit_scale=True, disable=None) as progress:
            components = {
                plan.name: _export_component(
                    plan, config, checkpoint, options, writer.folder, progress
                )
                for plan in plans
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


def _check_apart(checkpoint: Path, output: Path) -> None:
    """Refuse an output whose replacement would delete the checkpoint."""
    if Path(os.path.realpath(checkpoint)).is_relative_to(os.path.realpath(output)):
        raise ExportError(
            f"{output} holds the checkpoint {checkpoint}, so it is left alone; choose another "
            "--output"
        )


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
    plan: ComponentPlan,
    config: ModelConfig,
    checkpoint: Checkpoint,
    options: ExportOptions,
    folder: Path,
    progress: tqdm,
) -> Component:
    name = plan.name
    progress.set_description(f"{name}: tracing")
    graph = trace_component(plan.component, config, options.precision, packed=plan.is_lowered)
    if plan.is_lowered:
        graph = replace(graph, quantized=lower_for_ort(graph.model, plan.choose))
    progress.set_description(f"{name}: writing weights")
    data = write_weights(
        graph,
        weight_sources(plan.component, config, packed=plan.is_lowered),
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


def _copy_processor(checkpoint: Path, bundle: Path, config: ModelConfig) -> tuple[BundleFile, ...]:
    """Copy what preprocessing and tokenising need; returns the bundle's entries for it."""
    target = bundle / PROCESSOR
    target.mkdir()
    for name in (*_REQUIRED_PROCESSOR_FILES, *_OPTIONAL_PROCESSOR_FILES):
        if (checkpoint / name).is_file():
            _check_processor_file(checkpoint / name, config)
            shutil.copyfile(checkpoint / name, target / name)
        elif name in _REQUIRED_PROCESSOR_FILES:
            raise CheckpointError(
                f"{checkpoint} has no {name}; add the tokenizer and processor files of the model "
                "it was trained from"
            )
    for name, key in _PREPROCESSOR_FILES.items():
        _copy_preprocessor(checkpoint, target / name, key, config)
    names = sorted(path.name for path in target.iterdir())
    return tuple(BundleFile.of(bundle, f"{PROCESSOR}/{name}") for name in names)


def _check_processor_file(path: Path, config: ModelConfig) -> None:
    """Find damage now, and not when the bundle runs."""
    if path.name != "tokenizer.json":
        if path.suffix == ".json":
            read_json(path)
        return
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception
        raise CheckpointError(
            f"{path} is no readable tokenizer ({error}); download the checkpoint again"
        ) from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    vocab_size = config.text.vocab_size
    if largest >= vocab_size:
        raise CheckpointError(
            f"{path} has the token {largest}, but config.json gives the model a vocab_size of "
            f"{vocab_size}; use the tokenizer files of the model it was trained from"
        )


def _copy_preprocessor(checkpoint: Path, target: Path, key: str, model: ModelConfig) -> None:
    """Copy a preprocessor config, from inside processor_config.json or from its own file."""
    own, nested = checkpoint / target.name, checkpoint / "processor_config.json"
    # The order is that of transformers.
    config = read_json(nested).get(key) if nested.is_file() else None
    found = f"{key!r} in {nested}" if config is not None else str(own)
    if config is None and own.is_file():
        config = read_json(own)
    if config is None:
        raise CheckpointError(
            f"{checkpoint} has neither {target.name} nor a {key!r} entry in processor_config.json"
        )
    if not isinstance(config, dict):
        raise CheckpointError(f"{found} must be a JSON object, found {config!r}")
    for name, default, expected in (
        ("patch_size", _DEFAULT_PATCH_SIZES[target.name], model.vision.patch_size),
        ("temporal_patch_size", 2, model.vision.temporal_patch_size),
        ("merge_size", 2, model.vision.spatial_merge_size),
    ):
        value = config.get(name, default)
        if type(value) is not int or value != expected:
            raise CheckpointError(
                f"{found} has {name} {value!r}{'' if name in config else ' (the default)'}, but "
                f"the vision encoder of config.json needs {expected}; use the preprocessor files "
                "of the model it was trained from"
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
