"""Checkpoints and bundles that the tests share; each is made once a run, whatever the workers."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
from filelock import FileLock
from tests.shapes import PIXEL_LIMITS, RANDOM_SHAPES

from qwen3vl_export.pipeline import ExportOptions, export_bundle
from qwen3vl_runtime import ORTRunner
from qwen3vl_tools.random_checkpoint import write_random_checkpoint
from qwen3vl_tools.reference import Reference
from qwen3vl_tools.tiny import CHECKPOINT_DIR


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A run started in the background inherits an ignored SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all xdist workers of this run see."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def checkpoint(shared_folder: Path) -> Callable[[str], Path]:
    """The folder of a checkpoint: "trained", or a key of `RANDOM_SHAPES`."""

    def get(name: str) -> Path:
        if name == "trained":
            return CHECKPOINT_DIR
        folder = shared_folder / f"checkpoint-{name}"
        return _make_once(
            folder,
            lambda path: write_random_checkpoint(
                path, RANDOM_SHAPES[name], seed=1, pixel_limits=PIXEL_LIMITS
            ),
        )

    return get


@pytest.fixture(scope="session")
def bundle(shared_folder: Path, checkpoint: Callable[[str], Path]) -> Callable[..., Path]:
    """The folder of a checkpoint's bundle; tests must not change it."""

    def get(
        name: str, precision: str = "fp32", target: str = "onnx", prefill: str | None = None
    ) -> Path:
        options = ExportOptions(
            checkpoint=str(checkpoint(name)),
            output=shared_folder / f"bundle-{name}-{precision}-{target}-{prefill}",
            target=target,
            precision=precision,
            prefill_precision=prefill,
        )
        return _make_once(options.output, lambda _: export_bundle(options))

    return get


@pytest.fixture
def bundle_copy(bundle: Callable[..., Path], tmp_path: Path) -> Path:
    """A private copy of the trained checkpoint's bundle, to damage."""
    return Path(shutil.copytree(bundle("trained"), tmp_path / "bundle"))


@pytest.fixture(scope="session")
def runner(bundle: Callable[..., Path]) -> Callable[..., ORTRunner]:
    """A runner of a checkpoint's bundle, kept for the session; arguments as for `bundle`."""

    @lru_cache
    def get(name: str, *options: str) -> ORTRunner:
        return ORTRunner(bundle(name, *options), threads=1, capacity=2048)

    return get


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """Transformers on a checkpoint, fp32, kept for the session."""
    return lru_cache(lambda name: Reference(checkpoint(name)))


def _make_once(folder: Path, make: Callable[[Path], object]) -> Path:
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            make(folder)
    return folder
