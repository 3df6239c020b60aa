"""A component on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from qwen3vl_export.bundle import Component
from qwen3vl_export.errors import BundleError, InputError
from qwen3vl_runtime.session import TensorInfo, check_session

__all__ = ["OrtSession"]

#: ONNX Runtime's type names -> contract dtypes.
_DTYPES = {
    "tensor(int64)": "int64",
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
}
#: What goes wrong is raised; ONNX Runtime's own lines on stderr would only repeat it.
_LOG_FATAL_ONLY = 4


class OrtSession:
    """One graph loaded by ONNX Runtime's CPU provider; implements `session.Session`."""

    def __init__(self, path: Path, component: Component, *, threads: int | None = None) -> None:
        """Load the graph and check it against the manifest.

        Args:
            path: The ONNX file.
            component: Its entry in the manifest.
            threads: Threads of one operator; None lets ONNX Runtime take every physical core.

        Raises:
            BundleError: ONNX Runtime cannot load the graph.
            ContractError: Its inputs or outputs are not those of the manifest.
        """
        options = ort.SessionOptions()
        options.log_severity_level = _LOG_FATAL_ONLY
        if threads is not None:
            options.intra_op_num_threads = threads
        try:
            self._session = ort.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # ONNX Runtime raises a dozen unrelated types
            raise BundleError(
                f"ONNX Runtime {ort.__version__} cannot load {path}: {error}"
            ) from error
        inputs = [_info(node) for node in self._session.get_inputs()]
        outputs = [_info(node) for node in self._session.get_outputs()]
        check_session(component, inputs, outputs, str(path))
        self._output_names = [info.name for info in outputs]
        self._binding = self._session.io_binding()

    def run(
        self,
        feed: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Run the graph; see `session.Session.run`."""
        outputs = outputs or {}
        binding = self._binding
        # Arrays are bound by address: ONNX Runtime reads and writes them where they are, and an
        # output bound to an input's address (a KV cache) is updated in place.
        for name, array in feed.items():
            assert array.flags.c_contiguous, f"{name} is not contiguous"
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name in self._output_names:
            if name in outputs:
                array = outputs[name]
                binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
            else:
                binding.bind_output(name, "cpu")
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime raises a dozen unrelated types
            if "Failed to allocate memory" not in str(error):
                raise
            raise InputError(
                "there is not enough memory to run this request; lower max_pixels, prefill_chunk "
                "or the number of images and prompts"
            ) from error
        values = binding.get_outputs()
        results = {
            name: outputs[name] if name in outputs else value.numpy()
            for name, value in zip(self._output_names, values, strict=True)
        }
        # Bindings hold addresses of the caller's arrays, which may be gone before the next call.
        binding.clear_binding_inputs()
        binding.clear_binding_outputs()
        return results


def _info(node: Any) -> TensorInfo:
    shape = tuple(dim if isinstance(dim, int) else None for dim in node.shape)
    return TensorInfo(node.name, shape, _DTYPES.get(node.type, node.type))
