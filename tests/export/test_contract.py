"""Exported graphs against the contract, as strangers to this project read them.

The ONNX files are opened with `onnx`, checked with its full checker and run by ONNX Runtime at
sizes other than those they were traced with; nothing here trusts the exporter's own objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tests.shapes import RANDOM_SHAPES

from qwen3vl_export.bundle import Bundle
from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import (
    COMPONENTS,
    OPSET,
    PRECISIONS,
    TensorSpec,
    component_contract,
    contract_markdown,
)
from qwen3vl_export.errors import BundleError
from qwen3vl_runtime.session import numpy_dtype

#: Every shape in fp32; a precision changes types only, so two shapes of each other one hold all
#: that it can change. bf16 runs on no CPU provider, so there graphs are checked but not run.
CASES = [
    *((name, "fp32") for name in RANDOM_SHAPES),
    *((name, "fp16") for name in ("untied-head72", "four-levels")),
    *((name, "bf16") for name in ("no-deepstack", "one-layer")),
]
RUN_CASES = [case for case in CASES if case[1] != "bf16"]


def graph_of(folder: Path, component: str) -> onnx.ModelProto:
    return onnx.load(folder / f"{component}.onnx", load_external_data=False)


def describe(value: onnx.ValueInfoProto) -> tuple[str, tuple[int | str, ...], str]:
    tensor = value.type.tensor_type
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim
    )
    dtype = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    return value.name, shape, {"float": "float32"}.get(dtype, dtype)


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_graphs_are_what_the_contract_says(
    bundle: Callable[..., Path], name: str, precision: str
) -> None:
    folder = bundle(name, precision)
    config = ModelConfig.from_dict(RANDOM_SHAPES[name])
    for component in COMPONENTS:
        onnx.checker.check_model(folder / f"{component}.onnx", full_check=True)
        model = graph_of(folder, component)
        contract = component_contract(component, config).with_precision(precision)
        for values, specs in (
            (model.graph.input, contract.inputs),
            (model.graph.output, contract.outputs),
        ):
            assert [describe(value) for value in values] == [
                (spec.name, spec.shape, spec.dtype) for spec in specs
            ]


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_graphs_use_standard_operators_of_one_opset(
    bundle: Callable[..., Path], name: str, precision: str
) -> None:
    folder = bundle(name, precision)
    for component in COMPONENTS:
        model = graph_of(folder, component)
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]
        assert {node.domain for node in model.graph.node} == {""}
        assert not model.functions
        assert not any(
            attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
            for node in model.graph.node
            for attribute in node.attribute
        )


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_graph_files_hold_no_trace_of_the_machine_they_were_made_on(
    bundle: Callable[..., Path], name: str, precision: str
) -> None:
    """No paths, no stack traces, and data files named relative to the graph."""
    folder = bundle(name, precision)
    for component in COMPONENTS:
        content = (folder / f"{component}.onnx").read_bytes()
        for needle in (b".py", b"site-packages", b"Traceback", b'File "', b"pkg.torch"):
            assert needle not in content, (component, needle)
        # A path begins a string with a slash; node names have theirs in the middle.
        assert not re.search(rb"(?<![\w.\]])/(home|tmp|usr|root|work|opt|var|Users)/", content)
        assert str(folder).encode() not in content
        model = graph_of(folder, component)
        assert not model.metadata_props
        assert not model.graph.metadata_props
        locations = {
            entry.value
            for tensor in model.graph.initializer
            for entry in tensor.external_data
            if entry.key == "location"
        }
        assert locations == {f"{component}.onnx.data"}
        assert len(content) < 300_000


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_weights_are_stored_in_the_precision_and_rotary_angles_stay_fp32(
    bundle: Callable[..., Path], name: str, precision: str
) -> None:
    wanted = {"float32": "FLOAT"}.get(PRECISIONS[precision], PRECISIONS[precision].upper())
    for component in COMPONENTS:
        model = graph_of(bundle(name, precision), component)
        types = {
            tensor.name: onnx.TensorProto.DataType.Name(tensor.data_type)
            for tensor in model.graph.initializer
            if tensor.data_location == onnx.TensorProto.EXTERNAL
        }
        if component == "decoder":
            assert types.pop("rope.inv_freq") == "FLOAT"
            assert types.pop("rope.axis") == "INT64"
        assert set(types.values()) == {wanted}, component


def test_a_model_without_deepstack_has_no_deepstack_tensors(bundle: Callable[..., Path]) -> None:
    for component in COMPONENTS:
        model = graph_of(bundle("no-deepstack"), component)
        names = [value.name for value in (*model.graph.input, *model.graph.output)]
        assert not [name for name in names if "deepstack" in name]
        assert not [init.name for init in model.graph.initializer if "deepstack" in init.name]
    with_levels = [value.name for value in graph_of(bundle("tied"), "decoder").graph.input]
    assert "deepstack_embeds" in with_levels


@pytest.mark.parametrize("name", ["tied", "four-levels"])
def test_every_node_is_named_after_its_module(bundle: Callable[..., Path], name: str) -> None:
    for component in COMPONENTS:
        names = [node.name for node in graph_of(bundle(name), component).graph.node]
        assert len(set(names)) == len(names)
        assert all(re.fullmatch(r"[\w.]*/[A-Z]\w*", node) for node in names)
    decoder = [node.name for node in graph_of(bundle(name), "decoder").graph.node]
    assert "layers.0.mlp.up_proj/MatMul" in decoder
    assert "lm_head/MatMul" in decoder


def feed_of(
    specs: tuple[TensorSpec, ...], sizes: dict[str, int], config: ModelConfig
) -> dict[str, np.ndarray]:
    """Random inputs of the given sizes; integers are in range for every input."""
    rng = np.random.default_rng(0)
    upper = {
        "pos_embed_indices": config.vision.num_position_embeddings,
        "input_ids": config.text.vocab_size,
        "visual_indices": sizes["visual"],
        "position_ids": 50,
        "write_indices": sizes["capacity"] - sizes["seq"] + 1,
        "logits_indices": sizes["seq"],
    }
    feed = {}
    for spec in specs:
        shape = [dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape]
        if spec.dtype == "int64":
            low = -1 if spec.name == "visual_indices" else 0
            feed[spec.name] = rng.integers(low, upper[spec.name], shape)
        else:
            feed[spec.name] = rng.uniform(-1, 1, shape).astype(numpy_dtype(spec.dtype))
    return feed


_SIZES = [
    # One of each; then sizes that are all different, none of them used in tracing.
    dict.fromkeys(("frames", "merged", "batch", "seq", "visual", "capacity", "num_logits"), 1),
    {
        "frames": 2,
        "merged": 15,
        "batch": 3,
        "seq": 13,
        "visual": 17,
        "capacity": 37,
        "num_logits": 6,
    },
    {
        "frames": 5,
        "merged": 4,
        "batch": 1,
        "seq": 40,
        "visual": 1,
        "capacity": 40,
        "num_logits": 40,
    },
]


@pytest.mark.parametrize(("name", "precision"), RUN_CASES)
def test_every_symbolic_axis_takes_any_size(
    bundle: Callable[..., Path], name: str, precision: str
) -> None:
    folder = bundle(name, precision)
    config = ModelConfig.from_dict(RANDOM_SHAPES[name])
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    for component in COMPONENTS:
        contract = component_contract(component, config).with_precision(precision)
        session = ort.InferenceSession(
            folder / f"{component}.onnx", options, providers=["CPUExecutionProvider"]
        )
        for given in _SIZES:
            sizes = given | {
                "merged_patches": given["merged"],
                "patches": given["merged"] * config.vision.merge_unit,
            }
            results = session.run(None, feed_of(contract.inputs, sizes, config))
            for spec, result in zip(contract.outputs, results, strict=True):
                shape = [dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape]
                assert list(result.shape) == shape, (spec.name, given)
                assert result.dtype == numpy_dtype(spec.dtype)
                assert np.isfinite(result.astype(np.float32)).all(), spec.name


@pytest.mark.parametrize("data", [{}, {"name": "x"}, {"name": "x", "shape": 3, "dtype": "int64"}])
def test_a_malformed_tensor_description_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(BundleError, match="describes a tensor wrongly"):
        TensorSpec.from_dict(data)


def test_a_tensor_description_survives_json() -> None:
    spec = TensorSpec("logits", ("batch", 3), "float32")
    assert TensorSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize("name", ["tied", "no-deepstack"])
def test_the_markdown_names_every_tensor_with_a_meaning(name: str) -> None:
    config = ModelConfig.from_dict(RANDOM_SHAPES[name])
    rows = [
        line
        for line in contract_markdown(config).splitlines()
        if line.startswith(("| in", "| out"))
    ]
    shown = [row.split("|")[2].strip(" `") for row in rows]
    expected = [
        spec.name
        for component in COMPONENTS
        for specs in (
            component_contract(component, config).inputs,
            component_contract(component, config).outputs,
        )
        for spec in specs
        if not re.search(r"\.[1-9]\d*\.", spec.name)
    ]
    assert shown == expected
    assert all(row.count("|") == 6 for row in rows)


def test_the_manifest_carries_the_same_contract_as_the_graphs(
    bundle: Callable[..., Path],
) -> None:
    folder = bundle("four-levels")
    manifest = Bundle.open(folder).manifest
    for component in COMPONENTS:
        graph = graph_of(folder, component).graph
        entry = manifest.components[component]
        for values, specs in ((graph.input, entry.inputs), (graph.output, entry.outputs)):
            assert [describe(value) for value in values] == [
                (spec.name, spec.shape, spec.dtype) for spec in specs
            ]
