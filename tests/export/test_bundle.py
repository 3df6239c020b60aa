"""Reading bundles: every way in which a folder can be no good bundle is one clear sentence."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen3vl_export.bundle import FORMAT_VERSION, MANIFEST, Bundle, BundleFile, Manifest, sha256_of
from qwen3vl_export.config import ModelConfig
from qwen3vl_export.contract import COMPONENTS, component_contract
from qwen3vl_export.errors import BundleError, Qwen3VLError


def read_manifest(bundle: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((bundle / MANIFEST).read_text(encoding="utf-8"))
    return data


def write_manifest(bundle: Path, data: Any) -> None:
    (bundle / MANIFEST).write_text(json.dumps(data), encoding="utf-8")


def test_a_bundle_describes_itself(
    bundle: Callable[..., Path], checkpoint: Callable[[str], Path]
) -> None:
    opened = Bundle.open(bundle("trained"))
    config = json.loads((checkpoint("trained") / "config.json").read_text(encoding="utf-8"))
    assert opened.config == ModelConfig.from_dict(config)
    assert opened.manifest.model == config
    assert opened.manifest.precision == "fp32"
    assert opened.manifest.target == "onnx"
    assert tuple(opened.manifest.components) == COMPONENTS
    assert {"torch", "onnx", "onnxscript", "qwen3vl-export"} <= opened.manifest.tool_versions.keys()
    for name in COMPONENTS:
        contract = component_contract(name, opened.config).with_precision("fp32")
        component = opened.component(name)
        for found, specs in (
            (component.inputs, contract.inputs),
            (component.outputs, contract.outputs),
        ):
            assert [spec.to_dict() for spec in found] == [spec.to_dict() for spec in specs]
        assert opened.graph_path(name).is_file()


def test_the_manifest_lists_every_file_with_its_size_and_hash(
    bundle: Callable[..., Path],
) -> None:
    folder = bundle("trained")
    listed = {file.path: file for file in Bundle.open(folder).manifest.files}
    found = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }
    assert listed.keys() == found.keys()
    for name, path in found.items():
        assert listed[name].size == path.stat().st_size
        assert listed[name].sha256 == sha256_of(path)


def test_the_manifest_survives_its_json_form(bundle: Callable[..., Path]) -> None:
    data = read_manifest(bundle("trained"))
    assert Manifest.from_dict(data).to_dict() == data


def test_a_moved_bundle_still_opens(bundle_copy: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "model"
    moved.parent.mkdir()
    bundle_copy.rename(moved)
    assert Bundle.open(moved).graph_path("decoder").is_file()


def test_a_folder_that_is_no_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"found nothing at .*absent"):
        Bundle.open(tmp_path / "absent")
    with pytest.raises(BundleError, match=r"no manifest.json; make one with: qwen3vl-export"):
        Bundle.open(tmp_path)
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(BundleError, match="file is a file"):
        Bundle.open(tmp_path / "file")
    with pytest.raises(BundleError, match=r"expected a readable bundle, found: .*too long"):
        Bundle.open(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not readable JSON"),
        (b'{"format_version": 1, ', "is not readable JSON"),
        (b"\xff\xfe\x00", "is not readable JSON"),
        (b"[" * 100_000, "is not readable JSON"),
        (b"[1, 2]", "must hold a JSON object, found list"),
        (b"{}", "expected a bundle of format version 1, found None"),
        (b'{"format_version": 2}', "format version 1, found 2; export it again"),
        (b'{"format_version": "1"}', "format version 1, found '1'"),
        (b'{"format_version": 1}', "'target' is missing or malformed; export"),
    ],
)
def test_a_damaged_manifest_is_explained(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(BundleError, match=message):
        Bundle.open(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "vision.onnx",
        "vision.onnx.data",
        "decoder.onnx",
        "decoder.onnx.data",
        "embedding.onnx.data",
        "processor/tokenizer.json",
        "processor/preprocessor_config.json",
    ],
)
def test_one_changed_lost_or_missing_byte_is_found(bundle_copy: Path, name: str) -> None:
    path = bundle_copy / name
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = bytes([whole[middle] ^ 1])

    path.write_bytes(whole[:middle] + flipped + whole[middle + 1 :])
    with pytest.raises(BundleError, match=f"{name} is damaged: expected SHA-256 .*export the"):
        Bundle.open(bundle_copy)
    Bundle.open(bundle_copy, verify_hashes=False)

    path.write_bytes(whole[:-1])
    with pytest.raises(BundleError, match=f"{name} is damaged: expected .* bytes, found .*again"):
        Bundle.open(bundle_copy, verify_hashes=False)

    path.write_bytes(whole + b"\0")
    with pytest.raises(BundleError, match=f"{name} is damaged: expected .* bytes, found .*again"):
        Bundle.open(bundle_copy, verify_hashes=False)

    path.unlink()
    with pytest.raises(BundleError, match=f"{name} is missing; export the bundle again"):
        Bundle.open(bundle_copy, verify_hashes=False)

    path.write_bytes(whole)
    Bundle.open(bundle_copy)


@pytest.mark.parametrize(
    "path", ["../outside.data", "/etc/hostname", "processor/../../outside.data", "", "a/.."]
)
def test_a_listed_file_must_lie_inside_the_bundle(bundle_copy: Path, path: str) -> None:
    outside = bundle_copy.parent / "outside.data"
    shutil.copyfile(bundle_copy / "vision.onnx.data", outside)
    data = read_manifest(bundle_copy)
    data["components"]["vision"]["files"][1]["path"] = path
    write_manifest(bundle_copy, data)
    with pytest.raises(BundleError, match="names a file outside the bundle"):
        Bundle.open(bundle_copy)
    with pytest.raises(BundleError, match="outside the bundle"):
        BundleFile(path, 1, "00")


@pytest.mark.parametrize("path", ["../outside.onnx", "processor/tokenizer.json", "absent.onnx"])
def test_a_graph_must_be_one_of_its_components_checked_files(bundle_copy: Path, path: str) -> None:
    """Otherwise a graph that no hash vouches for would be loaded."""
    shutil.copyfile(bundle_copy / "vision.onnx", bundle_copy.parent / "outside.onnx")
    data = read_manifest(bundle_copy)
    data["components"]["vision"]["file"] = path
    write_manifest(bundle_copy, data)
    with pytest.raises(BundleError, match=r"does not list the graph file .* of vision"):
        Bundle.open(bundle_copy)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("precision", "int3", "precision fp32 or .*, found 'int3'"),
        ("target", "coreml", "target .*found 'coreml'; export it again"),
    ],
)
def test_an_unknown_kind_of_bundle_is_refused(
    bundle_copy: Path, key: str, value: str, message: str
) -> None:
    write_manifest(bundle_copy, read_manifest(bundle_copy) | {key: value})
    with pytest.raises(BundleError, match=message):
        Bundle.open(bundle_copy)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("precision",), "fp16", "fp16 model the graph vision has .*float16"),
        (("model", "text_config", "num_key_value_heads"), 4, "the graph decoder has"),
        (("model", "vision_config", "deepstack_visual_indexes"), [], "has no further tensor"),
        (
            ("components", "vision", "outputs"),
            [],
            "lists no further tensor; export the bundle again",
        ),
        (("components", "embedding", "inputs", 0, "dtype"), "int32", "lists .*'int32'"),
        (("components", "decoder", "inputs", 0, "name"), "embeds", "lists .*'embeds'"),
    ],
)
def test_entries_that_contradict_each_other_are_refused(
    bundle_copy: Path, place: tuple[Any, ...], value: Any, message: str
) -> None:
    """No file hash covers the manifest, so its model, precision and graphs must vouch together."""
    data = read_manifest(bundle_copy)
    target = data
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    write_manifest(bundle_copy, data)
    with pytest.raises(BundleError, match=f"the manifest contradicts itself: .*{message}"):
        Bundle.open(bundle_copy)


def test_an_output_listed_as_an_input_is_refused(bundle_copy: Path) -> None:
    data = read_manifest(bundle_copy)
    vision = data["components"]["vision"]
    vision["inputs"].append(vision["outputs"].pop(0))
    write_manifest(bundle_copy, data)
    with pytest.raises(BundleError, match=r"has no further tensor, but its entry lists .*embeds"):
        Bundle.open(bundle_copy)


def test_a_component_that_no_contract_knows_is_refused(bundle_copy: Path) -> None:
    data = read_manifest(bundle_copy)
    data["components"]["extra"] = data["components"]["vision"]
    write_manifest(bundle_copy, data)
    with pytest.raises(BundleError, match=r"contradicts itself: expected only .*found 'extra'"):
        Bundle.open(bundle_copy)


def test_a_missing_component_says_how_to_get_it(bundle_copy: Path) -> None:
    data = read_manifest(bundle_copy)
    del data["components"]["vision"]
    write_manifest(bundle_copy, data)
    opened = Bundle.open(bundle_copy)
    with pytest.raises(BundleError, match=r"no vision graph .*--components including vision"):
        opened.graph_path("vision")


def _places(data: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    places = [place] if place else []
    for key, value in items:
        if key != "tool_versions":
            places += _places(value, (*place, key))
    return places


@pytest.mark.parametrize(
    "junk", [None, "x", 7, -1, 1.5, True, [], [None], {}, {"x": 1}, "REMOVE"], ids=repr
)
def test_junk_anywhere_in_a_manifest_is_explained(bundle: Callable[..., Path], junk: Any) -> None:
    """Every value in turn: the result is a parsed manifest or a BundleError, never a crash."""
    whole = read_manifest(bundle("trained"))
    # The copies of one kind of entry are all parsed by the same lines.
    del whole["components"]["embedding"]
    for component in whole["components"].values():
        component["inputs"], component["outputs"] = component["inputs"][:2], []
    accepted = []
    for place in _places(whole):
        data = copy.deepcopy(whole)
        target = data
        for key in place[:-1]:
            target = target[key]
        if junk == "REMOVE":
            del target[place[-1]]
        else:
            target[place[-1]] = junk
        try:
            manifest = Manifest.from_dict(data)
            ModelConfig.from_dict(manifest.model)
            _ = manifest.files, manifest.to_dict(), [c.size for c in manifest.components.values()]
        except Qwen3VLError:
            continue
        accepted.append(place)
    # Nothing that the manifest itself vouches with may be junk.
    required = {
        (key,)
        for key in ("format_version", "target", "precision", "components", "source")
        if not (junk == "x" and key == "source")
        and not (junk in ({}, {"x": 1}) and key == "components")
    }
    assert whole["format_version"] == FORMAT_VERSION
    assert not required & set(accepted)
