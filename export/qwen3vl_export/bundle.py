"""A bundle: the folder that holds a model's graphs, its processor files and a manifest of both.

Data moves between stages as bundles on disk. Reading one validates it, so that a missing,
truncated or altered file is a sentence before any work is done, never a wrong answer after it.
Writing is in `bundle_writer.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import (
    COMPONENTS,
    EXTRA_COMPONENTS,
    PRECISIONS,
    TARGETS,
    TensorSpec,
    component_contract,
)
from qwen3vl_export.errors import BundleError

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST",
    "PROCESSOR",
    "Bundle",
    "BundleFile",
    "Component",
    "Manifest",
    "sha256_of",
]

T = TypeVar("T")

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PROCESSOR = "processor"

_HASH_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class BundleFile:
    """One file of the bundle; `path` is relative to the bundle, with forward slashes."""

    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        """Refuse paths that leave the bundle."""
        parts = PurePosixPath(self.path).parts
        if not parts or ".." in parts or PurePosixPath(self.path).is_absolute():
            raise BundleError(f"the manifest names a file outside the bundle: {self.path!r}")

    @classmethod
    def of(cls, root: Path, path: str) -> BundleFile:
        """Measure and hash `root / path`."""
        full = root / path
        return cls(path, full.stat().st_size, sha256_of(full))


@dataclass(frozen=True)
class Component:
    """One graph: its ONNX file, all files it consists of, and its inputs and outputs."""

    name: str
    file: str
    files: tuple[BundleFile, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def size(self) -> int:
        """Bytes of the graph and its weights."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class Manifest:
    """The parsed content of `manifest.json`."""

    target: str
    precision: str
    model: dict[str, Any]
    components: dict[str, Component]
    processor_files: tuple[BundleFile, ...]
    source: str
    tool_versions: dict[str, str]

    @property
    def files(self) -> tuple[BundleFile, ...]:
        """Every file the manifest vouches for."""
        graphs = [file for component in self.components.values() for file in component.files]
        return (*graphs, *self.processor_files)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "format_version": FORMAT_VERSION,
            "target": self.target,
            "precision": self.precision,
            "source": self.source,
            "tool_versions": self.tool_versions,
            "components": {
                name: {
                    "file": component.file,
                    "files": [vars(file) for file in component.files],
                    "inputs": [spec.to_dict() for spec in component.inputs],
                    "outputs": [spec.to_dict() for spec in component.outputs],
                }
                for name, component in self.components.items()
            },
            "processor_files": [vars(file) for file in self.processor_files],
            "model": self.model,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Manifest:
        """Parse the JSON form; raises BundleError when it is malformed or of another version."""
        version = data.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise BundleError(
                f"expected a bundle of format version {FORMAT_VERSION}, found {version!r}; "
                "export it again with this version of qwen3vl-export"
            )
        try:
            return cls(
                target=_known(data, "target", tuple(TARGETS)),
                precision=_known(data, "precision", tuple(PRECISIONS)),
                model=_typed(data, "model", dict),
                components={
                    name: _parse_component(name, entry)
                    for name, entry in _typed(data, "components", dict).items()
                },
                processor_files=_parse_files(data["processor_files"]),
                source=_typed(data, "source", str),
                tool_versions=_typed(data, "tool_versions", dict),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise BundleError(
                f"{MANIFEST} is damaged: the entry {error} is missing or malformed; "
                "export the bundle again"
            ) from error


@dataclass(frozen=True)
class Bundle:
    """A validated bundle on disk."""

    path: Path
    manifest: Manifest
    config: ModelConfig

    @classmethod
    def open(cls, path: str | Path, *, verify_hashes: bool = True) -> Bundle:
        """Read and validate the bundle in `path`.

        Args:
            path: The bundle folder.
            verify_hashes: Also compare every file's SHA-256 with the manifest. Without it only
                presence and size are checked.

        Raises:
            BundleError: The folder is no bundle, a file is missing, truncated or altered, or the
                manifest contradicts itself.
        """
        root = Path(path)
        try:
            manifest = Manifest.from_dict(_read_manifest(root))
            _check_files(root, manifest.files, verify_hashes=verify_hashes)
        except OSError as error:  # no permission, or a name longer than any path
            raise BundleError(f"expected a readable bundle, found: {error}; check it") from error
        config = ModelConfig.from_dict(manifest.model)
        for component in manifest.components.values():
            _check_contract(component, config, manifest.precision)
        return cls(root, manifest, config)

    @property
    def processor(self) -> Path:
        """Folder with the tokenizer, chat template and preprocessor files."""
        return self.path / PROCESSOR

    def component(self, name: str) -> Component:
        """The component `name`; raises BundleError when the bundle was exported without it."""
        if name not in self.manifest.components:
            raise BundleError(
                f"{self.path} has no {name} graph (it has {sorted(self.manifest.components)}); "
                f"export it again with --components including {name}"
            )
        return self.manifest.components[name]

    def graph_path(self, name: str) -> Path:
        """Path of a component's ONNX file."""
        return self.path / self.component(name).file


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _read_manifest(root: Path) -> dict[str, Any]:
    if not root.is_dir():
        found = f"{root} is a file" if root.exists() else f"found nothing at {root}"
        raise BundleError(f"expected a bundle folder, but {found}")
    path = root / MANIFEST
    if not path.is_file():
        raise BundleError(
            f"expected a bundle, but {root} has no {MANIFEST}; make one with: "
            f"qwen3vl-export export CHECKPOINT --output {root}"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not readable JSON ({error}); export again") from error
    if not isinstance(data, dict):
        raise BundleError(f"{path} must hold a JSON object, found {type(data).__name__}")
    return data


def _parse_files(entries: Iterable[dict[str, Any]]) -> tuple[BundleFile, ...]:
    return tuple(
        BundleFile(_typed(e, "path", str), _typed(e, "size", int), _typed(e, "sha256", str))
        for e in entries
    )


def _typed(entry: dict[str, Any], key: str, kind: type[T]) -> T:
    value = entry[key]
    if type(value) is not kind:
        raise KeyError(key)
    return value


def _known(entry: dict[str, Any], key: str, known: tuple[str, ...]) -> str:
    value = _typed(entry, key, str)
    if value not in known:
        raise BundleError(
            f"expected a bundle with {key} {' or '.join(known)}, found {value!r}; "
            "export it again with this version of qwen3vl-export"
        )
    return value


def _parse_component(name: str, entry: dict[str, Any]) -> Component:
    files = _parse_files(entry["files"])
    # Only listed files are checked, so a graph elsewhere would be loaded as it is.
    if entry["file"] not in [file.path for file in files]:
        raise BundleError(f"the manifest does not list the graph file {entry['file']!r} of {name}")
    return Component(
        name=name,
        file=entry["file"],
        files=files,
        inputs=tuple(TensorSpec.from_dict(spec) for spec in entry["inputs"]),
        outputs=tuple(TensorSpec.from_dict(spec) for spec in entry["outputs"]),
    )


def _check_contract(component: Component, config: ModelConfig, precision: str) -> None:
    """The runtime binds by model, precision and component; they must mean the same graph."""
    name = component.name
    if name not in (*COMPONENTS, *EXTRA_COMPONENTS):
        raise BundleError(
            f"the manifest contradicts itself: expected only {', '.join(COMPONENTS)} as "
            f"components, found {name!r}; export the bundle again"
        )
    contract = component_contract(name, config).with_precision(precision)
    for specs in ((contract.inputs, component.inputs), (contract.outputs, component.outputs)):
        for pair in zip_longest(*specs):
            expected, found = (spec.to_dict() if spec else "no further tensor" for spec in pair)
            if found != expected:
                raise BundleError(
                    f"the manifest contradicts itself: by its {precision} model the graph {name} "
                    f"has {expected}, but its entry lists {found}; export the bundle again"
                )


def _check_files(root: Path, files: tuple[BundleFile, ...], *, verify_hashes: bool) -> None:
    for file in files:
        path = root / file.path
        if not path.is_file():
            raise BundleError(f"{path} is missing; export the bundle again")
        size = path.stat().st_size
        if size != file.size:
            raise BundleError(
                f"{path} is damaged: expected {file.size:,} bytes, found {size:,}; export again"
            )
    if not verify_hashes:
        return
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda file: sha256_of(root / file.path), files)
        for file, digest in zip(files, digests, strict=True):
            if digest != file.sha256:
                raise BundleError(
                    f"{root / file.path} is damaged: expected SHA-256 {file.sha256[:12]}..., "
                    f"found {digest[:12]}...; export the bundle again"
                )
