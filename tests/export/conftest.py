"""What the exporter's tests share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def folder(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A private copy of a small checkpoint whose one shard is named by an index."""
    return Path(shutil.copytree(checkpoint("one-layer"), tmp_path / "checkpoint"))
