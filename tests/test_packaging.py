"""The wheel: what users install holds the four packages and the checkpoint, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from qwen3vl_export import __version__
from qwen3vl_tools.tiny import CHECKPOINT_DIR

_REPOSITORY = Path(__file__).parents[1]
_PACKAGES = {"qwen3vl_export", "qwen3vl_runtime", "qwen3vl_calibration", "qwen3vl_tools"}
_MAX_WHEEL_BYTES = 6_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    # Built from a copy, so that a build leaves no file in the working tree.
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(_REPOSITORY / name, source / name)
    for name in ("export", "runtime", "calibration", "tools"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(_REPOSITORY / name, source / name, ignore=ignore)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder]
    done = subprocess.run([*command, source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def read_metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"qwen3vl_export-{__version__}.dist-info/{name}").decode()


def test_top_level_names_are_the_four_packages(wheel: Path) -> None:
    """A stray `tests` or `tools` would collide with other people's packages."""
    top_level = {name.split("/")[0] for name in names_in(wheel)}
    assert top_level == {*_PACKAGES, f"qwen3vl_export-{__version__}.dist-info"}


def test_every_module_and_every_checkpoint_file_is_inside(wheel: Path) -> None:
    found = set(names_in(wheel))
    for root in ("export", "runtime", "calibration", "tools"):
        for path in (_REPOSITORY / root).rglob("*.py"):
            assert path.relative_to(_REPOSITORY / root).as_posix() in found
    inside = {name for name in found if name.startswith("qwen3vl_tools/tiny/checkpoint/")}
    assert {Path(name).name for name in inside} == {path.name for path in CHECKPOINT_DIR.iterdir()}
    assert not [name for name in found if name.endswith((".pyc", ".onnx", ".data"))]


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size <= _MAX_WHEEL_BYTES
    checkpoint_bytes = sum(path.stat().st_size for path in CHECKPOINT_DIR.iterdir())
    assert checkpoint_bytes <= _MAX_WHEEL_BYTES


def test_metadata_names_the_command_the_extras_and_the_licence(wheel: Path) -> None:
    assert "qwen3vl-export = qwen3vl_tools.cli:main" in read_metadata(wheel, "entry_points.txt")
    lines = read_metadata(wheel, "METADATA").splitlines()
    assert f"Version: {__version__}" in lines
    assert "License-File: LICENSE" in lines
    extras = {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra: ")}
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extras == project["optional-dependencies"].keys()
    # These are named in error messages.
    assert {"cpu", "export"} <= extras
    base = [line.split(": ")[1] for line in lines if line.startswith("Requires-Dist: ")]
    base = [requirement for requirement in base if "extra ==" not in requirement]
    for heavy in ("torch", "transformers", "onnx", "huggingface"):
        assert not [requirement for requirement in base if requirement.startswith(heavy)]


def test_an_unpacked_wheel_works_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import sys, qwen3vl_tools.cli as cli\n"
        "from qwen3vl_tools.tiny import CHECKPOINT_DIR\n"
        "from qwen3vl_export.checkpoint import Checkpoint, check_weights\n"
        "from qwen3vl_export.config import ModelConfig\n"
        "opened = Checkpoint.open(CHECKPOINT_DIR)\n"
        "check_weights(opened, ModelConfig.from_dict(opened.config))\n"
        "print(cli.__file__, CHECKPOINT_DIR)\n"
        "cli.main(['--version'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    paths, version = done.stdout.splitlines()
    assert all(Path(path).is_relative_to(tmp_path) for path in paths.split())
    assert version == f"qwen3vl-export {__version__}"
