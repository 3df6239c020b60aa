"""Checkpoint weights, streamed one tensor at a time into a graph's external data file.

Peak memory is the largest tensor plus one block: a tensor is mapped, cast (and transposed) block
by block, hashed and written, and its pages are released before the next one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from qwen3vl_export.bundle import BundleFile
from qwen3vl_export.checkpoint import Checkpoint
from qwen3vl_export.contract import PRECISIONS
from qwen3vl_export.errors import ExportError
from qwen3vl_export.graph import ComponentGraph
from qwen3vl_export.modules import WeightSource

__all__ = ["weight_bytes", "write_weights"]

#: Page size: an aligned tensor can be memory-mapped by the runtime instead of copied.
_ALIGNMENT_BYTES = 4096
_BLOCK_BYTES = 32 << 20


def weight_bytes(sources: dict[str, WeightSource], precision: str) -> int:
    """Bytes that the weights of a component take in `precision`, without alignment."""
    itemsize = _torch_dtype(precision).itemsize
    return sum(itemsize * torch.Size(source.shape).numel() for source in sources.values())


def write_weights(
    graph: ComponentGraph,
    sources: dict[str, WeightSource],
    checkpoint: Checkpoint,
    precision: str,
    data_path: Path,
    on_progress: Callable[[int], object],
) -> BundleFile:
    """Fill the graph's weights from the checkpoint into `data_path`.

    Args:
        graph: Its weight initializers become references into the data file.
        sources: Where each weight comes from, by initializer name.
        checkpoint: The open checkpoint.
        precision: Key of `PRECISIONS`: the type that weights are stored in.
        data_path: File to create, beside the ONNX file.
        on_progress: Called with the number of bytes just written.

    Returns:
        The data file's size and hash.

    Raises:
        ExportError: A weight is not finite, or overflows the precision.
    """
    dtype = _torch_dtype(precision)
    digest = hashlib.sha256()
    offset = 0
    with data_path.open("wb") as file:
        for name in graph.weights:
            offset += _pad(file, digest, offset)
            length = 0
            for block in _blocks(name, graph, sources, checkpoint, dtype):
                data = _bytes(block)
                file.write(data)
                digest.update(data)
                length += len(data)
                on_progress(len(data))
            _refer(graph.model.graph.initializers[name], data_path, offset, length)
            offset += length
    return BundleFile(data_path.name, offset, digest.hexdigest())


def _torch_dtype(precision: str) -> torch.dtype:
    dtype = getattr(torch, PRECISIONS[precision])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _blocks(
    name: str,
    graph: ComponentGraph,
    sources: dict[str, WeightSource],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
) -> Iterator[Tensor]:
    """The weight as the graph stores it, in blocks along its first axis."""
    if name in graph.constants:
        yield graph.constants[name]
        return
    source = sources[name]
    with checkpoint.tensor(source.tensor) as tensor:
        if source.transposed:
            tensor = tensor.flatten(1).T  # [out, in(, ...)] -> [in, out]
        row_bytes = max(1, tensor[:1].numel() * tensor.element_size())
        for block in torch.split(tensor, max(1, _BLOCK_BYTES // row_bytes)):
            converted = block.to(dtype)
            # NaN carries through the extrema, and two of them are found 10x faster than isfinite.
            if not all(math.isfinite(extreme) for extreme in torch.aminmax(converted)):
                raise ExportError(_not_finite(source.tensor, block, dtype))
            yield converted


def _bytes(block: Tensor) -> memoryview:
    """The block in C order; as integers, which torch transposes twice as fast as half floats."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[block.element_size()]
    contiguous = block.view(integers).contiguous().numpy()
    return contiguous.reshape(-1).view(np.uint8).data


def _not_finite(name: str, block: Tensor, dtype: torch.dtype) -> str:
    if not torch.isfinite(block).all():
        return f"{name} holds NaN or infinite values; the checkpoint is damaged"
    limit = torch.finfo(dtype).max
    return (
        f"{name} reaches {block.abs().max().item():.6g}, beyond the largest {dtype} value "
        f"{limit:g}; export with --precision bf16 or fp32"
    )


def _pad(file: BinaryIO, digest: hashlib._Hash, offset: int) -> int:
    padding = bytes(-offset % _ALIGNMENT_BYTES)
    file.write(padding)
    digest.update(padding)
    return len(padding)


def _refer(value: ir.Value, data_path: Path, offset: int, length: int) -> None:
    assert value.dtype is not None
    assert value.shape is not None
    value.const_value = ir.ExternalTensor(
        data_path.name,
        offset,
        length,
        value.dtype,
        shape=value.shape,
        name=value.name or "",
        base_dir=data_path.parent,
    )
