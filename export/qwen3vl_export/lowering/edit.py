"""Small helpers for editing a graph in place, shared by the passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir

__all__ = ["Editor", "attribute", "num_heads", "only_reader", "producer", "rotated_flat"]


class Editor:
    """Inserts nodes and redirects values in one graph."""

    def __init__(self, model: ir.Model) -> None:
        """Edit the model's main graph."""
        self.model = model
        self.graph = model.graph
        self._anchor: ir.Node | None = None
        self._count = 0

    @contextmanager
    def before(self, node: ir.Node) -> Iterator[None]:
        """Insert what is made inside the block before `node`, named after its module."""
        outer, self._anchor = self._anchor, node
        try:
            yield
        finally:
            self._anchor = outer

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        *,
        num_outputs: int = 1,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """Insert a node; returns its outputs."""
        assert self._anchor is not None
        module = (self._anchor.name or "").rpartition("/")[0]
        node = ir.node(
            op_type,
            inputs,
            attributes=attributes,
            domain=domain,
            num_outputs=num_outputs,
            name=self._unique(f"{module}/{op_type}"),
        )
        for output in node.outputs:
            output.name = self._unique(f"{module}/{op_type}_out")
        self.graph.insert_before(self._anchor, node)
        if domain:
            self.graph.opset_imports.setdefault(domain, 1)
        return node.outputs

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Insert a standard node with one output."""
        return self.node(op_type, inputs, **attributes)[0]

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Insert a cast."""
        return self.op("Cast", value, to=dtype.value)

    def constant(self, array: np.ndarray) -> ir.Value:
        """Add a small initializer."""
        return self.initializer(self._unique("constant"), ir.tensor(array))

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """Add an initializer under a name."""
        value = ir.Value(
            name=name,
            shape=ir.Shape(tensor.shape.numpy()),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def weight(self, name: str, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
        """An initializer whose data is still to be filled in; made once for each name."""
        found = self.graph.initializers.get(name)
        if found is not None:
            return found
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.graph.initializers[name] = value
        return value

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Let everything that reads `old` read `new`; an output keeps its name."""
        new.type, new.shape = old.type, old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        if new.is_graph_output():
            name, old.name = old.name, self._unique("replaced")
            new.name = name

    def _unique(self, stem: str) -> str:
        self._count += 1
        return f"{stem}.{self._count}"


def rotated_flat(editor: Editor, rotary: ir.Node) -> ir.Value:
    """The rotary embedding of heads side by side, [batch, seq, heads * dim].

    `rotary` rotates [batch, heads, seq, dim], which a transpose made of [batch, seq, heads, dim].
    """
    split = producer(rotary.inputs[0]).inputs[0]
    flat = editor.op("Reshape", split, editor.constant(np.array([0, 0, -1])))
    heads = num_heads(rotary.inputs[0])
    return editor.op("RotaryEmbedding", flat, *rotary.inputs[1:3], num_heads=heads)


def producer(value: ir.Value | None) -> ir.Node:
    """The node that makes `value`, which must not be a graph input."""
    assert value is not None
    node = value.producer()
    assert node is not None, f"{value.name} is an input"
    return node


def only_reader(value: ir.Value) -> ir.Node:
    """The one node that reads `value`."""
    (usage,) = value.uses()
    return usage.node


def num_heads(value: ir.Value | None) -> int:
    """Heads of a value [batch, heads, seq, dim]."""
    assert value is not None
    assert value.shape is not None
    heads = value.shape[1]
    assert isinstance(heads, int)
    return heads


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """An attribute's value, or `default` where the node leaves it out."""
    found = node.attributes.get(name)
    return default if found is None else found.value
