"""`ORTRunner`: a bundle on ONNX Runtime."""

from __future__ import annotations

import os
from pathlib import Path

from qwen3vl_export.bundle import Bundle
from qwen3vl_export.contract import COMPONENTS, EXTRA_COMPONENTS
from qwen3vl_export.errors import BundleError, InputError, MissingExtraError
from qwen3vl_runtime.limits import shown
from qwen3vl_runtime.runner import Runner, RunnerOptions
from qwen3vl_runtime.session import Sessions

__all__ = ["ORTRunner"]


class ORTRunner(Runner):
    """Runs a bundle's ONNX graphs on ONNX Runtime's CPU provider.

    Example:
        runner = ORTRunner("bundle")
        messages = [{"role": "user", "content": [
            {"type": "image", "image": "photo.jpg"}, {"type": "text", "text": "What is this?"}]}]
        print(runner.generate(messages).text)
    """

    def __init__(
        self,
        bundle: str | Path | Bundle,
        *,
        capacity: int | None = None,
        max_batch: int = RunnerOptions.max_batch,
        prefill_chunk: int = RunnerOptions.prefill_chunk,
        allow_urls: bool = RunnerOptions.allow_urls,
        threads: int | None = None,
        verify_hashes: bool = True,
    ) -> None:
        """Open, validate and load a bundle.

        Args:
            bundle: Its folder, or one opened already.
            capacity: Most tokens, prompt and answer, of one sequence.
            max_batch: Most sequences answered at once.
            prefill_chunk: Prompt tokens run in one call.
            allow_urls: Whether messages may name http(s) URLs to download.
            threads: Threads of one operator; None takes every physical core.
            verify_hashes: Compare every file with the manifest before loading it.

        Raises:
            BundleError: The bundle is incomplete, damaged, or cannot run on ONNX Runtime's CPU.
            ContractError: A graph is not what the manifest says.
            InputError: A limit is not a positive number.
            MissingExtraError: ONNX Runtime is not installed.
        """
        options = RunnerOptions(capacity, max_batch, prefill_chunk, allow_urls)
        cores = os.cpu_count() or 1
        if threads is not None and (type(threads) is not int or not 1 <= threads <= cores):
            raise InputError(
                f"threads must be an integer from 1 to {cores}, the logical cores of this machine, "
                f"found {shown(threads)}"
            )
        if not isinstance(bundle, Bundle):
            bundle = Bundle.open(bundle, verify_hashes=verify_hashes)
        super().__init__(bundle, _load_sessions(bundle, threads), options)


def _load_sessions(bundle: Bundle, threads: int | None) -> Sessions:
    if bundle.manifest.precision == "bf16":
        raise BundleError(
            f"{bundle.path} is bf16, which ONNX Runtime's CPU provider cannot run; export it with "
            "--precision fp32 or fp16"
        )
    try:
        from qwen3vl_runtime.ort_session import OrtSession
    except ImportError as error:
        raise MissingExtraError("ORTRunner", "cpu", error) from error
    return Sessions(
        **{
            name: OrtSession(bundle.graph_path(name), bundle.component(name), threads=threads)
            for name in (*COMPONENTS, *EXTRA_COMPONENTS)
            if name in COMPONENTS or name in bundle.manifest.components
        }
    )
