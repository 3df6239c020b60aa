"""Checkpoint weights, streamed one tensor at a time into a graph's external data file.

Peak memory is the largest tensor plus one block: a tensor is mapped, cast (and transposed) block
by block, hashed and written, and its pages are released before the next one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from qwen3vl_export.bundle import BundleFile
from qwen3vl_export.checkpoint import Checkpoint
from qwen3vl_export.contract import PRECISIONS
from qwen3vl_export.errors import ExportError
from qwen3vl_export.graph import ComponentGraph
from qwen3vl_export.lowering import quantized_names
from qwen3vl_export.modules import WeightSource
from qwen3vl_export.quantization import BlockScheme, Scheme, quantize_blocks, quantize_channels

__all__ = ["weight_bytes", "write_weights"]

#: Page size: an aligned tensor can be memory-mapped by the runtime instead of copied.
_ALIGNMENT_BYTES = 4096
_BLOCK_BYTES = 32 << 20


def weight_bytes(
    sources: dict[str, WeightSource], precision: str, choose: Callable[[str], Scheme | None]
) -> int:
    """Bytes that a component's weights take, without alignment, scales and padding of blocks.

    Args:
        sources: The component's weights, by initializer name.
        precision: Key of `PRECISIONS`: the type of those that stay in float.
        choose: How a linear's weight is quantised; None leaves it in float.
    """
    total = 0.0
    for name, source in sources.items():
        scheme = choose(name) if source.transposed else None
        bits = 8 * _torch_dtype(precision).itemsize if scheme is None else scheme.bits
        total += source.num_values * bits / 8
    return int(total)


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
    with _DataFile(graph.model, data_path, on_progress) as file:
        for name in graph.weights:
            if name in graph.constants:
                file.add(name, [graph.constants[name]])
            elif name in graph.quantized:
                _add_quantized(file, name, sources[name], checkpoint, graph.quantized[name])
            else:
                file.add(name, _blocks(sources[name], checkpoint, dtype))
        return file.entry


class _DataFile:
    """External data being written: aligned, hashed, and referred to by the model's initializers."""

    def __init__(self, model: ir.Model, path: Path, on_progress: Callable[[int], object]) -> None:
        self._initializers = model.graph.initializers
        self._path = path
        self._on_progress = on_progress
        self._digest = hashlib.sha256()
        self._size = 0

    def __enter__(self) -> Self:
        self._file = self._path.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def entry(self) -> BundleFile:
        """The file's size and hash so far."""
        return BundleFile(self._path.name, self._size, self._digest.hexdigest())

    def add(self, name: str, blocks: Iterable[Tensor]) -> None:
        """Append the data of initializer `name`, given in blocks along its first axis."""
        self._write(bytes(-self._size % _ALIGNMENT_BYTES))
        offset = self._size
        for block in blocks:
            data = _bytes(block)
            self._write(data)
            self._on_progress(len(data))
        value = self._initializers[name]
        assert value.dtype is not None
        assert value.shape is not None
        value.const_value = ir.ExternalTensor(
            self._path.name,
            offset,
            self._size - offset,
            value.dtype,
            shape=value.shape,
            name=name,
            base_dir=self._path.parent,
        )

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._size += len(data)


def _add_quantized(
    file: _DataFile, name: str, source: WeightSource, checkpoint: Checkpoint, scheme: Scheme
) -> None:
    if isinstance(scheme, BlockScheme):
        _add_blocks(file, name, source, checkpoint, scheme)
    else:
        _add_channels(file, name, source, checkpoint)


def _quantized_rows(
    source: WeightSource,
    checkpoint: Checkpoint,
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Integers and scales of a weight's output channels, a few MB at a time."""
    for part in source.tensors:
        with checkpoint.tensor(part.name) as tensor:
            rows = tensor.flatten(1)  # [out, in(, ...)] -> [out, in]
            for block in torch.split(rows, max(1, _BLOCK_BYTES // (4 * rows.shape[1]))):
                _check_finite(part.name, block, block)
                yield quantize(block)


def _add_channels(file: _DataFile, name: str, source: WeightSource, checkpoint: Checkpoint) -> None:
    """Write int8 [in, out] and scales [out]; the integers are held once, to transpose them."""
    rows = list(_quantized_rows(source, checkpoint, quantize_channels))
    integers = torch.cat([integers for integers, _ in rows]).T  # [out, in] -> [in, out]
    integers_name, scales_name = quantized_names(name)
    file.add(integers_name, torch.split(integers, max(1, _BLOCK_BYTES // integers.shape[1])))
    file.add(scales_name, [scales for _, scales in rows])


def _add_blocks(
    file: _DataFile, name: str, source: WeightSource, checkpoint: Checkpoint, scheme: BlockScheme
) -> None:
    """Write a weight's integers, then its scales, which are kept until all integers are out."""
    scales: list[Tensor] = []

    def integers() -> Iterator[Tensor]:
        quantize = partial(quantize_blocks, scheme=scheme)
        for packed, scale in _quantized_rows(source, checkpoint, quantize):
            scales.append(scale)
            yield packed

    integers_name, scales_name = quantized_names(name)
    file.add(integers_name, integers())
    file.add(scales_name, scales)


def _torch_dtype(precision: str) -> torch.dtype:
    dtype = getattr(torch, PRECISIONS[precision])
    assert isinstance(dtype, torch.dtype)
    return dtype


def _blocks(source: WeightSource, checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[Tensor]:
    """The weight as the graph stores it, in blocks along its first axis."""
    with ExitStack() as stack:
        tensors = [stack.enter_context(checkpoint.tensor(part.name)) for part in source.tensors]
        if source.transposed:
            tensors = [tensor.flatten(1).T for tensor in tensors]  # [out, in(, ...)] -> [in, out]
        for blocks in _row_blocks(tensors):
            converted = [block.to(dtype) for block in blocks]
            for part, block, result in zip(source.tensors, blocks, converted, strict=True):
                _check_finite(part.name, block, result)
            yield converted[0] if len(converted) == 1 else torch.cat(converted, dim=-1)


def _row_blocks(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of tensors that are joined along their last axis, a few MB at a time."""
    if tensors[0].ndim == 1:
        yield tuple(tensors)
        return
    row_bytes = sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)
    rows = max(1, _BLOCK_BYTES // row_bytes)
    yield from zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)


def _bytes(block: Tensor) -> memoryview:
    """The block in C order; as integers, which torch transposes twice as fast as half floats."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    contiguous = block.view(kinds[block.element_size()]).contiguous().numpy()
    return contiguous.reshape(-1).view(np.uint8).data


def _check_finite(name: str, stored: Tensor, converted: Tensor) -> None:
    """Raise ExportError when a block is not finite, or is so no more in its new type."""
    # NaN carries through the extrema, which are found 10x faster than by isfinite.
    if all(math.isfinite(extreme) for extreme in torch.aminmax(converted)):
        return
    if not torch.isfinite(stored).all():
        raise ExportError(f"{name} holds NaN or infinite values; the checkpoint is damaged")
    limit = torch.finfo(converted.dtype).max
    raise ExportError(
        f"{name} reaches {stored.abs().max().item():.6g}, beyond the largest {converted.dtype} "
        f"value {limit:g}; export with --precision bf16 or fp32"
    )
