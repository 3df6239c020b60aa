"""A graph that is not what its manifest says, or does not fit the machine, is refused in words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qwen3vl_export.bundle import Bundle
from qwen3vl_export.errors import BundleError, ContractError
from qwen3vl_runtime import ORTRunner
from qwen3vl_runtime.ort_session import OrtSession


@pytest.fixture(scope="module")
def trained(bundle: Callable[..., Path]) -> Bundle:
    return Bundle.open(bundle("trained"), verify_hashes=False)


def test_graph_of_another_component_is_refused(trained: Bundle) -> None:
    with pytest.raises(ContractError, match="differs from its manifest"):
        OrtSession(trained.graph_path("vision"), trained.component("embedding"))


@pytest.mark.parametrize(
    "change",
    [{"name": "renamed"}, {"dtype": "float16"}, {"shape": ("batch", "seq", 999)}],
)
def test_one_wrong_tensor_is_named(trained: Bundle, change: dict[str, object]) -> None:
    component = trained.component("embedding")
    changed = replace(component.outputs[0], **change)
    wrong = replace(component, outputs=(changed, *component.outputs[1:]))
    with pytest.raises(ContractError, match=r"1 output|2 output") as error:
        OrtSession(trained.graph_path("embedding"), wrong)
    assert "inputs_embeds" in str(error.value)


def test_unreadable_graph_is_refused(trained: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "vision.onnx"
    path.write_bytes(b"not a graph")
    with pytest.raises(BundleError, match="cannot load"):
        OrtSession(path, trained.component("vision"))


def test_bf16_bundle_is_refused_before_loading(bundle: Callable[..., Path]) -> None:
    with pytest.raises(BundleError, match="bf16, which ONNX Runtime's CPU provider cannot run"):
        ORTRunner(bundle("trained", "bf16"))


_LARGE_IMAGE = """
import resource, sys
from PIL import Image
from qwen3vl_export.errors import InputError
from qwen3vl_runtime import ORTRunner

runner = ORTRunner(sys.argv[1], capacity=60_000, threads=1)
side = 3200  # 40,000 patches, whose attention scores take 19 GB
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
part = {"type": "image", "image": Image.new("RGB", (side, side)), "max_pixels": side * side}
try:
    runner.generate([{"role": "user", "content": [part]}])
except InputError as error:
    print(error)
"""


def test_image_beyond_the_memory_is_refused(bundle: Callable[..., Path]) -> None:
    command = [sys.executable, "-c", _LARGE_IMAGE, str(bundle("trained"))]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "not enough memory" in result.stdout


def test_outputs_are_written_where_asked(trained: Bundle) -> None:
    session = OrtSession(trained.graph_path("embedding"), trained.component("embedding"))
    hidden, levels = trained.config.text.hidden_size, trained.config.num_deepstack_levels
    feed = {
        "input_ids": np.array([[1, 2, 3]]),
        "visual_indices": np.full((1, 3), -1),
        "visual_embeds": np.zeros((1, hidden), np.float32),
        "deepstack_visual_embeds": np.zeros((levels, 1, hidden), np.float32),
    }
    expected = session.run(feed)["inputs_embeds"]
    given = np.empty_like(expected)
    results = session.run(feed, {"inputs_embeds": given})
    assert results["inputs_embeds"] is given
    np.testing.assert_array_equal(given, expected)
    assert np.abs(given).max() > 0
