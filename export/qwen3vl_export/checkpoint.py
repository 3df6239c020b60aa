"""A Hugging Face checkpoint on disk: its config, its tensors, and the files of its processor.

Only safetensors are read: a pickled `.bin` can run code when it is opened. Nothing is loaded
here; `tensor` maps one tensor at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import COMPONENTS
from qwen3vl_export.errors import CheckpointError, UnsupportedModelError
from qwen3vl_export.modules import EMBEDDING_WEIGHT, HEAD_WEIGHT, weight_sources

__all__ = ["Checkpoint", "TensorInfo", "check_weights", "read_json"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOAT_DTYPES = ("F32", "F16", "BF16")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w.-]+")
_SHOWN_NAMES = 5
_MAX_JSON_DEPTH = 64
_COMPARED_ROWS = 4096


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor, as its shard's header describes it."""

    shard: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose shards are all present and whole."""

    folder: Path
    source: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """Open a local folder or download a Hugging Face model id.

        Raises:
            CheckpointError: It is missing, incomplete, truncated, or not safetensors.
        """
        try:
            folder = _resolve(str(source))
            config = read_json(folder / "config.json")
            shards = _shards(folder)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {source} cannot be read: {error}; check its path and permissions"
            ) from error
        tensors: dict[str, TensorInfo] = {}
        for shard in shards:
            header = _read_header(shard)
            for name in header.keys() & tensors.keys():
                other = tensors[name].shard.name
                raise CheckpointError(
                    f"{name} is stored in both {other} and {shard.name} in {folder}"
                )
            tensors.update(header)
        return cls(folder, str(source), config, tensors)

    @contextmanager
    def tensor(self, name: str) -> Iterator[Tensor]:
        """Map one tensor for reading; its pages are released on exit."""
        # A shard is opened anew for each tensor: one long-lived mapping would count every page
        # ever touched as this process' memory.
        with safe_open(self.tensors[name].shard, framework="pt") as file:
            yield file.get_tensor(name)


def check_weights(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Compare the stored tensors with what the config implies.

    Raises:
        CheckpointError: Tensors are missing, unexpected, or of another shape.
        UnsupportedModelError: Tensors are stored in a type that is not a plain float.
    """
    expected = {
        tensor.name: tensor.shape
        for component in COMPONENTS
        for source in weight_sources(component, config).values()
        for tensor in source.tensors
    }
    found = checkpoint.tensors
    missing = sorted(expected.keys() - found.keys())
    # transformers ignores a stored head that equals the embedding it is tied to.
    ignored = {HEAD_WEIGHT} if config.tie_word_embeddings else set()
    unexpected = sorted(found.keys() - expected.keys() - ignored)
    if missing or unexpected:
        raise CheckpointError(_difference(checkpoint, missing, unexpected))
    for name, shape in expected.items():
        info = found[name]
        if info.dtype not in _FLOAT_DTYPES:
            raise UnsupportedModelError(
                f"{name} is stored as {info.dtype}, expected one of {', '.join(_FLOAT_DTYPES)}; "
                "use the unquantised checkpoint"
            )
        if info.shape != shape:
            raise CheckpointError(
                f"{name} has shape {list(info.shape)}, but config.json implies {list(shape)}; "
                "the config and the weights belong to different checkpoints"
            )
    if ignored & found.keys():
        _check_tied_head(checkpoint)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint; raises CheckpointError when there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} has no {path.name}; expected a Hugging Face checkpoint folder"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(data).__name__}")
    if _is_deeper(data, _MAX_JSON_DEPTH):  # what reads it later recurses: repr, dumps
        raise CheckpointError(
            f"{path} is nested more than {_MAX_JSON_DEPTH} levels deep, which no checkpoint needs; "
            "restore the original file"
        )
    return data


def _is_deeper(data: Any, depth: int) -> bool:
    level = [data]
    for _ in range(depth):
        objects = [node.values() if isinstance(node, dict) else node for node in level]
        level = [child for node in objects for child in node if isinstance(child, (dict, list))]
    return bool(level)


def _check_tied_head(checkpoint: Checkpoint) -> None:
    """Refuse a head beside the embedding it should be tied to, unless the two are equal.

    transformers then unties them and uses the stored head, against the config.
    """
    with checkpoint.tensor(HEAD_WEIGHT) as head, checkpoint.tensor(EMBEDDING_WEIGHT) as embedding:
        equal = head.shape == embedding.shape and all(
            torch.equal(ours.float(), theirs.float())
            for ours, theirs in zip(
                torch.split(head, _COMPARED_ROWS),
                torch.split(embedding, _COMPARED_ROWS),
                strict=True,
            )
        )
    if not equal:
        raise CheckpointError(
            f"config.json says tie_word_embeddings, but {HEAD_WEIGHT} differs from "
            f"{EMBEDDING_WEIGHT}; set tie_word_embeddings to false to use that head, or remove it "
            "from the weights"
        )


def _resolve(source: str) -> Path:
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"expected a checkpoint folder, but {source} is a file")
    if not _HUB_ID.fullmatch(source):
        raise CheckpointError(f"expected a checkpoint folder, found nothing at {source}")
    return _download(source)


def _download(model_id: str) -> Path:
    # Imported here because a local checkpoint needs no hub client.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = ["*.safetensors", "*.json", "*.jinja"]
    try:
        return Path(snapshot_download(model_id, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{model_id} is no local folder, and could not be downloaded from the Hugging Face "
            f"Hub: {reason}"
        ) from error


def _shards(folder: Path) -> list[Path]:
    """The weight files, in the order of preference of transformers; others are not merged in."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if (folder / _INDEX).is_file():
        weight_map = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / _INDEX} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
                raise CheckpointError(
                    f"{folder / _INDEX} names a shard outside the checkpoint folder: {name!r}; "
                    "download the checkpoint again"
                )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{len(missing)} of {len(names)} shards named by {_INDEX} are missing from "
                f"{folder}, first: {missing[0]}; download the checkpoint again"
            )
        return [folder / name for name in names]
    shards = sorted(folder.glob("*.safetensors"))
    if shards:
        return shards
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{folder} holds pickled weights ({pickles[0]}), which can run code when opened and "
            "are not read; save the model again with save_pretrained(safe_serialization=True)"
        )
    raise CheckpointError(f"{folder} has no .safetensors file")


def _read_header(shard: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(shard, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: TensorInfo(shard, tuple(part.get_shape()), part.get_dtype())
                for name, part in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{shard} is truncated or damaged ({error}); download the checkpoint again"
        ) from error


def _difference(checkpoint: Checkpoint, missing: list[str], unexpected: list[str]) -> str:
    lines = [f"the weights in {checkpoint.folder} do not match its config.json"]
    for title, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = ", ..." if len(names) > _SHOWN_NAMES else ""
            lines.append(f"{len(names)} {title}: {', '.join(names[:_SHOWN_NAMES])}{more}")
    lines.append(f"likely cause: {_likely_cause(missing, unexpected)}")
    return "; ".join(lines)


def _likely_cause(missing: list[str], unexpected: list[str]) -> str:
    if any("lora_" in name or name.startswith("base_model.") for name in unexpected):
        return "this is an adapter; merge it into its base model first"
    if any(name.endswith(("weight_scale", "weight_scale_inv", "qweight")) for name in unexpected):
        return "the weights are quantised; use the unquantised checkpoint"
    if missing == ["lm_head.weight"]:
        return "the embeddings are tied, but config.json does not say tie_word_embeddings"
    if missing and unexpected:
        return "another architecture or naming; load and save it with transformers first"
    if missing:
        return "an incomplete download or save"
    return "config.json describes a smaller model than the weights"
