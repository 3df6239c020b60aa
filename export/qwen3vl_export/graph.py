"""One component -> one ONNX graph without weights, its tensors named by `contract.py`.

The module is traced with fake tensors, so tracing costs no weight memory whatever the model's
size; every weight is left as an initializer without data for `weights.py` to fill.
"""

from __future__ import annotations

import ast
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import (
    OPSET,
    PRECISIONS,
    ComponentContract,
    TensorSpec,
    component_contract,
)
from qwen3vl_export.errors import ContractError
from qwen3vl_export.modules import make_module
from qwen3vl_export.quantization import Scheme
from qwen3vl_export.text_decoder import mrope_constants

__all__ = ["ComponentGraph", "trace_component"]

#: Sizes of the symbolic dimensions while tracing: all different and above 1, because torch.export
#: specialises 0 and 1 and would unify nothing that merely happens to be equal.
_TRACE_SIZES = {
    "frames": 3,
    "batch": 2,
    "seq": 5,
    "visual": 7,
    "capacity": 11,
    "num_logits": 4,
    "merged_patches": 6,
}


@dataclass(frozen=True)
class ComponentGraph:
    """A traced component whose weights are still to be filled in.

    Attributes:
        contract: Its inputs and outputs, with the float type made concrete.
        model: The ONNX model; initializers in `weights` have a shape and a type but no data.
        weights: Names of the initializers that stand for weights, in graph order.
        constants: Values of initializers that are computed rather than stored.
        quantized: How those weights are quantised that are not stored as floats.
    """

    contract: ComponentContract
    model: ir.Model
    weights: tuple[str, ...]
    constants: dict[str, Tensor]
    quantized: dict[str, Scheme] = field(default_factory=dict)


def trace_component(
    component: str, config: ModelConfig, precision: str, *, packed: bool = False
) -> ComponentGraph:
    """Trace one component.

    Args:
        component: One of `contract.COMPONENTS`.
        config: Shape of the model.
        precision: Key of `PRECISIONS`.
        packed: As in `modules.make_module`.

    Raises:
        ContractError: The traced graph lost or gained an input or output.
    """
    contract = component_contract(component, config).with_precision(precision)
    with FakeTensorMode(shape_env=ShapeEnv()):
        dtype = getattr(torch, PRECISIONS[precision])
        module = make_module(component, config, dtype, packed=packed)
        inputs = [_example(spec, config) for spec in contract.inputs]
    shapes = _dynamic_shapes(contract.inputs, config)
    if component == "decoder":
        inputs, shapes = _pair_caches(inputs, config), _pair_caches(shapes, config)
    with _quiet_exporter():
        program = torch.onnx.export(
            module,
            tuple(inputs),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=tuple(shapes),
            optimize=False,
            verbose=False,
        )
        assert program is not None
        model = program.model
        weights = _drop_fake_values(model)
        onnxscript.optimizer.optimize_ir(model)
    _apply_contract(model, contract)
    _name_dimensions(model, config)
    _name_nodes(model)
    return ComponentGraph(
        contract=contract,
        model=model,
        weights=tuple(name for name in weights if name in model.graph.initializers),
        constants=mrope_constants(config.text) if component == "decoder" else {},
    )


def _example(spec: TensorSpec, config: ModelConfig) -> Tensor:
    sizes = _TRACE_SIZES | {"patches": _TRACE_SIZES["merged_patches"] * config.vision.merge_unit}
    shape = [dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape]
    return torch.empty(shape, dtype=getattr(torch, spec.dtype))


def _dynamic_shapes(specs: tuple[TensorSpec, ...], config: ModelConfig) -> list[dict[int, Dim]]:
    dims = {name: Dim(name) for name in _TRACE_SIZES}
    dims["patches"] = config.vision.merge_unit * dims["merged_patches"]
    return [
        {axis: dims[dim] for axis, dim in enumerate(spec.shape) if isinstance(dim, str)}
        for spec in specs
    ]


def _pair_caches(values: list, config: ModelConfig) -> list:  # type: ignore[type-arg]
    """Group the flat cache inputs into one (key, value) pair a layer, and absent DeepStack."""
    first_cache = len(values) - 2 * config.text.num_hidden_layers
    head, caches = values[:first_cache], values[first_cache:]
    if config.num_deepstack_levels == 0:
        head.insert(1, None)
    return [*head, list(zip(caches[::2], caches[1::2], strict=True))]


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence notes that a user cannot act on.

    They concern torchvision operators, dimension names that tensors share, and initializers that
    have no value yet, which here is the point.
    """
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _drop_fake_values(model: ir.Model) -> list[str]:
    """Detach the fake tensors from the initializers; returns the names of these."""
    weights = []
    for name, value in model.graph.initializers.items():
        raw = getattr(value.const_value, "raw", None)
        if isinstance(raw, Tensor):
            value.const_value = None
            weights.append(name)
    return weights


def _apply_contract(model: ir.Model, contract: ComponentContract) -> None:
    """Give inputs and outputs their contract names and shapes, after checking their types."""
    graph = model.graph
    graph.name = contract.name
    for values, specs in ((graph.inputs, contract.inputs), (graph.outputs, contract.outputs)):
        if len(values) != len(specs):
            raise ContractError(
                f"the traced {contract.name} graph has {len(values)} tensors where the contract "
                f"has {len(specs)}: {[value.name for value in values]}"
            )
        for value, spec in zip(values, specs, strict=True):
            _check_traced(value, spec)
            value.name = spec.name
            value.shape = ir.Shape(spec.shape)


def _check_traced(value: ir.Value, spec: TensorSpec) -> None:
    dtype = _dtype_name(value)
    fixed = [dim if isinstance(dim, int) else None for dim in value.shape or ()]
    wanted = [dim if isinstance(dim, int) else None for dim in spec.shape]
    if dtype != spec.dtype or fixed != wanted:
        raise ContractError(
            f"the traced tensor {value.name} is {dtype}{fixed}, but the contract's {spec.name} "
            f"is {spec.dtype}{wanted}"
        )


def _name_dimensions(model: ir.Model, config: ModelConfig) -> None:
    """Express intermediate shapes in the contract's dimension names, others as unknown."""
    names = {name: name for name in _TRACE_SIZES}
    names[f"{config.vision.merge_unit}*merged_patches"] = "patches"
    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None and not value.is_graph_output():
                value.shape = ir.Shape(
                    dim if isinstance(dim, int) else names.get(str(dim.value))
                    for dim in value.shape
                )


def _name_nodes(model: ir.Model) -> None:
    """Name each node after its module, `layers.0.mlp.up_proj/MatMul`, and drop the trace's notes.

    The exporter's own metadata is longer than the graph and holds paths of the machine it ran on.
    """
    counts: Counter[str] = Counter()
    for node in model.graph:
        scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
        module = next((s for s in reversed(scopes[:-1]) if s and not s.startswith("_")), "")
        name = f"{module}/{node.op_type}"
        counts[name] += 1
        node.name = name if counts[name] == 1 else f"{name}_{counts[name]}"
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()


def _dtype_name(value: ir.Value) -> str:
    return "" if value.dtype is None else str(value.dtype.numpy())
