"""Speed and memory of bundles at the real 2B shape, beside the limits of the machine they ran on.

Makes a random checkpoint of the 2B shape, exports it once a precision, and runs every bundle in a
process of its own, in turn, several rounds; the best of each figure counts, since other work on
the machine only ever slows it down. The same run measures what the machine can do at most.

    python -m qwen3vl_tools.speed --work DIR --precision fp32 int8 int4
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qwen3vl_tools.extras import needs_extra

__all__ = ["main"]

_GRIDS = {"vision_512px_s": (32, 32), "vision_1024px_s": (64, 64)}
_PROMPTS = (300, 1024)
_DECODE_STEPS = 16
_GEMM = (1024, 2048, 6144)
_READ_BYTES = 1 << 30
_COLUMNS = {
    "weights_gb": "weights GB",
    "load_s": "load s",
    "vision_512px_s": "vision 512px s",
    "vision_1024px_s": "vision 1024px s",
    "prefill_300_s": "prefill 300 s",
    "prefill_1024_s": "prefill 1024 s",
    "decode_300_ms": "decode ms at 300",
    "decode_1024_ms": "decode ms at 1024",
    "peak_rss_gib": "peak RSS GiB",
}


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="measure bundles at the real 2B shape")
    parser.add_argument("--work", type=Path, help="folder for the checkpoint and the bundles")
    parser.add_argument("--precision", nargs="+", default=["fp32", "int8", "int4"])
    parser.add_argument("--prefill-precision", choices=("int8",), help="as for `export`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--bundle", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.bundle is not None:
        print(json.dumps(_measure(args.bundle, args.threads)))
        return 0
    bundles = [
        _export(args.work, precision, args.prefill_precision) for precision in args.precision
    ]
    rows: dict[str, dict[str, float]] = {}
    for _ in range(args.rounds):
        for bundle in bundles:
            row = _measure_apart(bundle, args.threads)
            best = rows.setdefault(bundle.name, row)
            rows[bundle.name] = {key: min(value, best[key]) for key, value in row.items()}
    _print_table(rows)
    print(", ".join(f"{name} {value:.0f}" for name, value in _ceiling().items()))
    return 0


def _export(work: Path, precision: str, prefill_precision: str | None) -> Path:
    with needs_extra("`speed`", "export"):
        from qwen3vl_export.pipeline import ExportOptions, export_bundle
        from qwen3vl_tools.random_checkpoint import make_config, write_random_checkpoint
    checkpoint = work / "random-2b"
    if not checkpoint.exists():
        write_random_checkpoint(checkpoint, make_config("2b"))
    prefill = None if precision == "fp32" else prefill_precision
    output = work / (precision if prefill is None else f"{precision}-prefill-{prefill}")
    if not output.exists():
        options = ExportOptions(
            str(checkpoint), output, "ort-cpu", precision, prefill_precision=prefill
        )
        export_bundle(options)
    return output


def _measure_apart(bundle: Path, threads: int | None) -> dict[str, float]:
    command = [sys.executable, "-m", "qwen3vl_tools.speed", "--bundle", str(bundle)]
    command += [] if threads is None else ["--threads", str(threads)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    row: dict[str, float] = json.loads(output)
    return row


def _measure(path: Path, threads: int | None) -> dict[str, float]:
    import resource

    from qwen3vl_export.bundle import Bundle
    from qwen3vl_runtime import ORTRunner
    from qwen3vl_runtime.image_processor import VisualInput

    bundle = Bundle.open(path, verify_hashes=False)
    start = time.perf_counter()
    runner = ORTRunner(bundle, capacity=2048, max_batch=1, threads=threads)
    row = {
        "weights_gb": sum(part.size for part in bundle.manifest.components.values()) / 1e9,
        "load_s": time.perf_counter() - start,
    }
    for name, (height, width) in _GRIDS.items():
        pixels = np.zeros((1, height * width, bundle.config.vision.patch_dim), np.float32)
        visual = VisualInput(pixels, (1, height, width))
        row[name] = _best(lambda visual=visual: runner.vision.encode([visual]))  # type: ignore[misc]
    for tokens in _PROMPTS:
        row[f"prefill_{tokens}_s"] = _best(lambda n=tokens: _prefill(runner, n))  # type: ignore[misc]
        row[f"decode_{tokens}_ms"] = 1000 * _best(
            lambda n=tokens: _decode(runner, n),  # type: ignore[misc]
            _DECODE_STEPS,
        )
    row["peak_rss_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    return row


def _best(work: Callable[[], object], rounds: int = 2) -> float:
    """Shortest time in seconds, after one round that warms up."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def _prefill(runner: Any, tokens: int) -> None:
    runner.text.begin(1, tokens + 2 * _DECODE_STEPS)
    _call(runner, tokens, 0)


def _decode(runner: Any, cached: int) -> None:
    _call(runner, 1, cached)


def _call(runner: Any, seq: int, cached: int) -> None:
    from qwen3vl_runtime.text_model import DecoderCall

    call = DecoderCall(
        input_ids=np.full((1, seq), 5),
        visual_indices=np.full((1, seq), -1),
        position_ids=np.broadcast_to(np.arange(cached, cached + seq), (3, 1, seq)).copy(),
        write_indices=np.array([cached]),
        logits_indices=np.array([[seq - 1]]),
    )
    runner.text.forward(call, runner.text.no_visuals)


def _ceiling() -> dict[str, float]:
    """What the machine reaches: reading memory, and products in fp32 and int8."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    rows, inner, columns = _GEMM
    left = np.ones((rows, inner), np.float32)
    data = np.ones(_READ_BYTES // 8, np.int64)
    node = helper.make_node("DynamicQuantizeMatMul", ["x", "w", "s"], ["y"], domain="com.microsoft")
    float_type = TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "ceiling",
        [helper.make_tensor_value_info("x", float_type, [rows, inner])],
        [helper.make_tensor_value_info("y", float_type, [rows, columns])],
        [
            numpy_helper.from_array(np.ones((inner, columns), np.int8), "w"),
            numpy_helper.from_array(np.ones(columns, np.float32), "s"),
        ],
    )
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString())
    right = np.ones((inner, columns), np.float32)
    operations = 2 * rows * inner * columns / 1e9
    return {
        "memory read GB/s (1 thread)": _READ_BYTES / _best(data.sum, 4) / 1e9,
        "fp32 GFLOP/s": operations / _best(lambda: left @ right, 4),
        "int8 GOP/s": operations / _best(lambda: session.run(None, {"x": left}), 4),
    }


def _print_table(rows: dict[str, dict[str, float]]) -> None:
    print("| bundle | " + " | ".join(_COLUMNS.values()) + " |")
    print("|---" * (len(_COLUMNS) + 1) + "|")
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(f"{row[key]:.2f}" for key in _COLUMNS) + " |")


if __name__ == "__main__":
    sys.exit(main())
