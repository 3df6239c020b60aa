"""`run` where its surroundings are odd: no standard output, endlessly nested messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qwen3vl_tools.cli import main


def test_a_closed_standard_output_is_said() -> None:
    command = 'exec "$0" -m qwen3vl_tools.cli run no-bundle --prompt x >&-'
    done = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable], stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard output is closed")


def test_messages_nested_beyond_reading_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    assert main(["run", "no-bundle", "--messages", str(path)]) == 1
    assert "is not a readable JSON file" in capsys.readouterr().err
