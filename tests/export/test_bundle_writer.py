"""Writing bundles: complete or not at all, and never at the cost of what was there."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.shapes import RANDOM_SHAPES

from qwen3vl_export.bundle import FORMAT_VERSION, MANIFEST, Bundle, BundleFile, Component, Manifest
from qwen3vl_export.bundle_writer import BundleWriter
from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import component_contract
from qwen3vl_export.errors import ExportError


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def write(output: Path, content: bytes, *, force: bool = False) -> Bundle:
    """Write a bundle of one component that holds `content`."""
    with BundleWriter(output, force=force) as writer:
        (writer.folder / "vision.onnx").write_bytes(content)
        return writer.commit(manifest_of(writer.folder))


def manifest_of(folder: Path) -> Manifest:
    file = BundleFile.of(folder, "vision.onnx")
    config = ModelConfig.from_dict(RANDOM_SHAPES["tied"])
    contract = component_contract("vision", config).with_precision("fp32")
    return Manifest(
        target="onnx",
        precision="fp32",
        model=RANDOM_SHAPES["tied"],
        components={
            "vision": Component("vision", "vision.onnx", (file,), contract.inputs, contract.outputs)
        },
        processor_files=(),
        source="somewhere",
        tool_versions={},
    )


def test_a_committed_bundle_opens_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    output = tmp_path / "new" / "folder" / "bundle"
    bundle = write(output, b"graph")
    assert bundle.path == output
    assert files_in(output).keys() == {"vision.onnx", MANIFEST}
    assert list(output.parent.iterdir()) == [output]
    assert Bundle.open(output).manifest == bundle.manifest
    assert output.stat().st_mode & 0o777 == 0o755


def test_an_empty_folder_may_be_the_output(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    write(tmp_path / "bundle", b"graph")
    assert list(tmp_path.iterdir()) == [tmp_path / "bundle"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError])
def test_an_unfinished_bundle_is_removed_and_the_old_one_stays(
    tmp_path: Path, error: type[BaseException]
) -> None:
    output = tmp_path / "bundle"
    write(output, b"old")
    before = files_in(output)
    with pytest.raises(error), BundleWriter(tmp_path / "new" / "folder" / "bundle", force=False):
        raise error
    with pytest.raises(error), BundleWriter(output, force=True) as writer:  # noqa: PT012
        (writer.folder / "vision.onnx").write_bytes(b"half")
        assert files_in(output) == before
        raise error
    assert files_in(tmp_path) == {f"bundle/{name}": data for name, data in before.items()}
    assert list(tmp_path.iterdir()) == [output]


def test_an_existing_bundle_is_replaced_only_with_force(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    write(output, b"old")
    with pytest.raises(ExportError, match="already holds a bundle; add --force to replace it"):
        write(output, b"new")
    assert (output / "vision.onnx").read_bytes() == b"old"
    (output / "engines" / "a100").mkdir(parents=True)
    (output / "engines" / "a100" / "vision.engine").write_bytes(b"of the old bundle")
    (output / "calibration.safetensors").write_bytes(b"of the old bundle")
    write(output, b"new", force=True)
    assert files_in(output).keys() == {"vision.onnx", MANIFEST}
    assert (output / "vision.onnx").read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("name", ["notes.txt", "processor/mine", "engines"])
@pytest.mark.parametrize("link", [False, True])
def test_a_bundle_with_a_file_that_is_not_its_own_is_left_alone(
    tmp_path: Path, name: str, link: bool
) -> None:
    output = tmp_path / "bundle"
    write(output, b"old")
    (output / name).parent.mkdir(exist_ok=True)
    if link:
        (output / name).symlink_to(tmp_path)
    else:
        (output / name).write_bytes(b"mine")
    with pytest.raises(ExportError, match=rf"holds {name}, which is no part of the bundle there"):
        write(output, b"new", force=True)
    assert (output / "vision.onnx").read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 0])
def test_a_bundle_of_another_version_can_be_replaced(tmp_path: Path, version: int) -> None:
    output = tmp_path / "bundle"
    write(output, b"old")
    data = json.loads((output / MANIFEST).read_text(encoding="utf-8"))
    (output / MANIFEST).write_text(json.dumps(data | {"format_version": version}))
    write(output, b"new", force=True)
    assert Bundle.open(output).manifest.source == "somewhere"


@pytest.mark.parametrize(
    "content",
    [
        {"notes.txt": b"mine"},
        {".hidden": b"mine"},
        {MANIFEST: b'{"name": "a web app", "icons": []}', "index.html": b"mine"},
        {MANIFEST: b"not json", "index.html": b"mine"},
        {MANIFEST: b'["format_version"]', "index.html": b"mine"},
        {MANIFEST: b'{"format_version": 1}'},
        {MANIFEST: b"[" * 100_000},
    ],
    ids=[
        "file",
        "hidden-file",
        "web-manifest",
        "broken-manifest",
        "list-manifest",
        "foreign",
        "deep",
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_bundle_is_left_alone(
    tmp_path: Path, content: dict[str, bytes], force: bool
) -> None:
    output = tmp_path / "folder"
    output.mkdir()
    for name, data in content.items():
        (output / name).write_bytes(data)
    with pytest.raises(ExportError, match="is not a bundle, so it is left alone"):
        write(output, b"new", force=force)
    assert files_in(output) == content
    assert list(tmp_path.iterdir()) == [output]


def test_a_file_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "file"
    output.write_bytes(b"mine")
    with pytest.raises(ExportError, match="is not a bundle, so it is left alone"):
        write(output, b"new", force=True)
    assert output.read_bytes() == b"mine"


def test_a_folder_filled_during_the_export_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    with (  # noqa: PT012
        pytest.raises(ExportError, match="left alone"),
        BundleWriter(output, force=True) as writer,
    ):
        (writer.folder / "vision.onnx").write_bytes(b"new")
        output.mkdir()
        (output / "mine").write_bytes(b"mine")
        writer.commit(manifest_of(writer.folder))
    assert files_in(tmp_path) == {"bundle/mine": b"mine"}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()])
def test_a_failure_between_the_two_renames_brings_the_old_bundle_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    output = tmp_path / "bundle"
    write(output, b"old")
    before = files_in(output)
    rename = Path.rename

    def fail_for_the_new_one(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(type(error)):
        write(output, b"new", force=True)
    assert files_in(output) == before
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("number", [1, 2])
def test_a_signal_during_the_renames_is_seen_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, number: int
) -> None:
    output = tmp_path / "bundle"
    write(output, b"old")
    rename = Path.rename
    renamed: list[Path] = []

    def rename_and_interrupt(self: Path, target: Path) -> Path:
        renamed.append(self)
        result = rename(self, target)
        if len(renamed) == number:
            os.kill(os.getpid(), signum)
        return result

    monkeypatch.setattr(Path, "rename", rename_and_interrupt)
    handler = signal.signal(signum, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            write(output, b"new", force=True)
        assert signal.getsignal(signum) is signal.default_int_handler
    finally:
        signal.signal(signum, handler)
    assert len(renamed) == 2
    assert (output / "vision.onnx").read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [output]


def test_a_second_interrupt_does_not_stop_the_cleaning_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def interrupt_and_unlink(*args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        unlink(*args, **kwargs)

    monkeypatch.setattr(os, "unlink", interrupt_and_unlink)
    with (  # noqa: PT012
        pytest.raises(KeyboardInterrupt),
        BundleWriter(tmp_path / "bundle", force=False) as writer,
    ):
        (writer.folder / "vision.onnx").write_bytes(b"half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ExportError, match="is a link that leads to itself"):
        write(tmp_path / "a", b"new")


def test_a_link_to_a_bundle_is_followed(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    write(real, b"old")
    link.symlink_to(real)
    write(link, b"new", force=True)
    assert link.is_symlink()
    assert (real / "vision.onnx").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_too_little_free_space_is_said_before_any_work(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "bundle", force=False) as writer:
        writer.require_space(1)
        with pytest.raises(ExportError, match=r"needs 1000000000\.00 GB, but the disk of .* free"):
            writer.require_space(10**18)
    assert list(tmp_path.iterdir()) == []
