"""Each pass alone leaves a graph's results as they were, for every kind of call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx_ir.passes.common import RemoveUnusedNodesPass
from tests.shapes import RANDOM_SHAPES

from qwen3vl_export.bundle import Bundle
from qwen3vl_export.lowering import (
    use_group_query_attention,
    use_multi_head_attention,
    use_skip_norm,
)
from qwen3vl_runtime.ort_session import OrtSession

Bundles = Callable[..., Path]
Arrays = dict[str, np.ndarray]

#: Batch, tokens of the call, and tokens cached in each row.
CALLS = {
    "prefill": (1, 7, [0]),
    "decode": (1, 1, [9]),
    "batched prefill": (3, 6, [0, 0, 0]),
    "batched decode": (3, 1, [4, 11, 0]),
    "chunk": (1, 5, [8]),
    "batched chunk": (3, 5, [8, 0, 3]),
    "to the last slot": (2, 4, [28, 12]),
}
CAPACITY = 32


@pytest.fixture(scope="module")
def lowered(
    bundle: Bundles, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[OrtSession, OrtSession, Bundle]]:
    """A component's canonical graph and the same after one pass, both loaded."""

    def get(
        name: str, component: str, edit: Callable[[ir.Model], bool]
    ) -> tuple[OrtSession, OrtSession, Bundle]:
        opened = Bundle.open(bundle(name), verify_hashes=False)
        model = ir.load(opened.graph_path(component))
        assert edit(model)
        RemoveUnusedNodesPass()(model)
        path = tmp_path_factory.mktemp("lowered") / "graph.onnx"
        ir.save(model, path, external_data="graph.data")
        entry = opened.component(component)
        return (
            OrtSession(opened.graph_path(component), entry, threads=1),
            OrtSession(path, entry, threads=1),
            opened,
        )

    return get


@pytest.mark.parametrize("edit", [use_group_query_attention, use_skip_norm])
@pytest.mark.parametrize("name", list(RANDOM_SHAPES))
def test_decoder_pass(name: str, edit: Callable[[ir.Model], bool], lowered) -> None:
    canonical, changed, opened = lowered(name, "decoder", edit)
    for call, (batch, seq, cached) in CALLS.items():
        feed = _decoder_feed(opened, batch, seq, cached)
        expected, expected_caches = _run_decoder(canonical, feed)
        actual, actual_caches = _run_decoder(changed, feed)
        np.testing.assert_allclose(actual, expected, atol=5e-5, err_msg=call)
        for cache in expected_caches:
            np.testing.assert_allclose(
                actual_caches[cache], expected_caches[cache], atol=2e-5, err_msg=call
            )


def test_unused_slots_are_not_read(lowered) -> None:
    """What the canonical graph needs the runtime to do, this operator does by itself."""
    _, changed, opened = lowered("tied", "decoder", use_group_query_attention)
    feed = _decoder_feed(opened, 2, 3, [5, 0])
    clean, _ = _run_decoder(changed, feed)
    for name, array in feed.items():
        if name.startswith("past_key_values"):
            array[0, :, 8:], array[1, :, 3:] = np.nan, np.nan
    dirty, _ = _run_decoder(changed, feed)
    np.testing.assert_array_equal(dirty, clean)


@pytest.mark.parametrize("name", list(RANDOM_SHAPES))
@pytest.mark.parametrize(("frames", "patches"), [(1, 4), (3, 36)])
def test_vision_pass(name: str, frames: int, patches: int, lowered) -> None:
    canonical, changed, opened = lowered(name, "vision", use_multi_head_attention)
    rng = np.random.default_rng(0)
    feed = {
        spec.name: _random(rng, spec.dtype, _sized(spec.shape, frames=frames, patches=patches))
        for spec in opened.component("vision").inputs
    }
    expected, actual = canonical.run(feed), changed.run(feed)
    for output, array in expected.items():
        np.testing.assert_allclose(actual[output], array, atol=5e-5 * np.abs(array).max())


def test_a_pass_says_when_there_is_nothing_to_do(bundle: Bundles) -> None:
    opened = Bundle.open(bundle("tied"), verify_hashes=False)
    embedding = ir.load(opened.graph_path("embedding"))
    for edit in (use_group_query_attention, use_multi_head_attention, use_skip_norm):
        assert not edit(embedding)


def test_lowered_bundle_uses_the_fast_operators(bundle: Bundles) -> None:
    opened = Bundle.open(bundle("tied", "fp32", "ort-cpu"), verify_hashes=False)
    decoder = ir.load(opened.graph_path("decoder"))
    counts = [node.op_type for node in decoder.graph]
    layers = opened.config.text.num_hidden_layers
    assert counts.count("GroupQueryAttention") == layers
    assert counts.count("SkipSimplifiedLayerNormalization") == 2 * layers - 1
    assert counts.count("MatMul") == 4 * layers + 1
    assert not {"Attention", "TensorScatter"} & set(counts)


def _sized(shape: tuple[int | str, ...], **sizes: int) -> list[int]:
    return [dim if isinstance(dim, int) else sizes[dim] for dim in shape]


def _random(rng: np.random.Generator, dtype: str, shape: list[int]) -> np.ndarray:
    if dtype == "int64":
        return rng.integers(0, 100, shape)
    return rng.standard_normal(shape).astype(dtype)


def _decoder_feed(opened: Bundle, batch: int, seq: int, cached: list[int]) -> Arrays:
    rng = np.random.default_rng(0)
    sizes = {"batch": batch, "seq": seq, "capacity": CAPACITY, "num_logits": 2}
    feed = {
        spec.name: _random(rng, spec.dtype, _sized(spec.shape, **sizes))
        for spec in opened.component("decoder").inputs
    }
    feed["write_indices"] = np.array(cached)
    feed["logits_indices"] = np.tile([0, seq - 1], (batch, 1))
    for name, array in feed.items():
        if name.startswith("past_key_values"):
            for row, length in enumerate(cached):
                array[row, :, length:] = 0
    return feed


def _run_decoder(session: OrtSession, feed: Arrays) -> tuple[np.ndarray, Arrays]:
    caches = {name: array.copy() for name, array in feed.items() if name.startswith("past")}
    in_place = {name.replace("past_key_values", "present"): array for name, array in caches.items()}
    results = session.run({**feed, **caches}, in_place)
    return results["logits"], in_place


def test_onnx_runtime_is_new_enough() -> None:
    """The batched chunks above need an operator input that came with 1.32."""
    assert tuple(int(part) for part in ort.__version__.split(".")[:2]) >= (1, 32)
