"""The export as a whole: same answer from any packing of a checkpoint, or one error and no trace.

Failures are real ones: a file-size limit of the operating system stands in for a full disk, and
an interrupt arrives from the progress callback while weights are being written.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tqdm
from tests.shapes import PIXEL_LIMITS, RANDOM_SHAPES

from qwen3vl_export import pipeline
from qwen3vl_export.bundle import Bundle
from qwen3vl_export.contract import COMPONENTS
from qwen3vl_export.errors import BundleError, CheckpointError, ExportError
from qwen3vl_export.pipeline import ExportOptions, export_bundle
from qwen3vl_tools import random_checkpoint
from qwen3vl_tools.random_checkpoint import write_random_checkpoint


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def export(source: Path, output: Path, **options: object) -> Bundle:
    """Export only the embedding, which traces fastest, unless told otherwise."""
    options = {"precision": "fp32", "components": ("embedding",)} | options
    return export_bundle(ExportOptions(str(source), output, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int8"}, "target onnx must be one of fp16, fp32, bf16, found 'int8'"),
        ({"target": "ort-cpu"}, "target ort-cpu must be one of fp32, int8, int4, found 'fp16'"),
        ({"target": "tensorrt"}, "--target must be one of onnx, ort-cpu, found 'tensorrt'"),
        ({"prefill_precision": "int8"}, "goes with --target ort-cpu --precision int8 or int4"),
        ({"components": ("vision", "audio")}, "--components must be one of .* found 'audio'"),
        ({"components": ("vision", "vision")}, "each component once, found vision,vision"),
        ({"components": ()}, "--components must name at least one of vision, embedding, decoder"),
    ],
)
def test_options_that_name_nothing_are_refused(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        ExportOptions("checkpoint", tmp_path, **options)  # type: ignore[arg-type]


def test_processor_files_are_copied_unchanged(
    bundle: Callable[..., Path], checkpoint: Callable[[str], Path]
) -> None:
    source, processor = checkpoint("trained"), bundle("trained") / "processor"
    names = {path.name for path in source.iterdir()} - {"config.json", "model.safetensors"}
    assert {path.name for path in processor.iterdir()} == names
    for name in names:
        if name.endswith("preprocessor_config.json"):
            copied, original = (
                json.loads((folder / name).read_text(encoding="utf-8"))
                for folder in (processor, source)
            )
            assert copied == original
        else:
            assert (processor / name).read_bytes() == (source / name).read_bytes()


def test_one_component_alone_equals_its_part_of_a_whole_export(
    bundle: Callable[..., Path], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also proves that an export is reproducible, byte by byte."""
    part = export(checkpoint("one-layer"), tmp_path / "part")
    assert tuple(part.manifest.components) == ("embedding",)
    whole = Bundle.open(bundle("one-layer"))
    assert part.component("embedding") == whole.component("embedding")
    assert sorted(path.name for path in part.path.iterdir()) == [
        "embedding.onnx",
        "embedding.onnx.data",
        "manifest.json",
        "processor",
    ]
    with pytest.raises(BundleError, match=r"no decoder graph .* including decoder"):
        part.component("decoder")


def test_shards_give_the_same_bundle_as_one_file(
    bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_checkpoint, "_SHARD_BYTES", 200_000)
    sharded = tmp_path / "sharded"
    write_random_checkpoint(sharded, RANDOM_SHAPES["one-layer"], seed=1, pixel_limits=PIXEL_LIMITS)
    assert len(list(sharded.glob("*.safetensors"))) == 3
    made = export(sharded, tmp_path / "bundle", components=COMPONENTS)
    whole = Bundle.open(bundle("one-layer"))
    assert made.manifest.components == whole.manifest.components
    assert made.manifest.processor_files == whole.manifest.processor_files


@pytest.fixture
def source(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("one-layer"), tmp_path / "in" / "checkpoint"))


def test_preprocessors_nested_in_processor_config_are_found(source: Path, tmp_path: Path) -> None:
    """Transformers 5.x writes one file where 4.57 wrote two."""
    nested = {}
    for name, key in (
        ("preprocessor_config.json", "image_processor"),
        ("video_preprocessor_config.json", "video_processor"),
    ):
        nested[key] = json.loads((source / name).read_text(encoding="utf-8"))
        (source / name).unlink()
    (source / "processor_config.json").write_text(json.dumps(nested), encoding="utf-8")
    made = export(source, tmp_path / "bundle")
    written = made.processor / "preprocessor_config.json"
    assert json.loads(written.read_text(encoding="utf-8")) == nested["image_processor"]
    written = made.processor / "video_preprocessor_config.json"
    assert json.loads(written.read_text(encoding="utf-8")) == nested["video_processor"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer.json", "has no tokenizer.json; add the tokenizer and processor files"),
        ("tokenizer_config.json", "has no tokenizer_config.json; add"),
        (
            "preprocessor_config.json",
            "neither preprocessor_config.json nor a 'image_processor' entry",
        ),
        (
            "video_preprocessor_config.json",
            "neither video_preprocessor_config.json nor a 'video_processor' entry",
        ),
    ],
)
def test_a_missing_processor_file_is_named_and_nothing_is_left(
    source: Path, tmp_path: Path, name: str, message: str
) -> None:
    (source / name).unlink()
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=message):
        export(source, out / "bundle")
    assert not out.exists()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the operating system refuse to write beyond `size` bytes of any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("limit", [100, 20_000, 100_000], ids=["processor", "tokenizer", "weights"])
def test_a_full_disk_is_a_sentence_and_leaves_the_old_bundle(
    source: Path, bundle: Callable[..., Path], tmp_path: Path, limit: int
) -> None:
    out = tmp_path / "out"
    shutil.copytree(bundle("one-layer"), out / "bundle")
    before = snapshot(out)
    with (
        largest_file(limit),
        pytest.raises(
            ExportError,
            match=r"^writing .*bundle failed: File too large; nothing was written there$",
        ),
    ):
        export(source, out / "bundle", force=True)
    assert snapshot(out) == before
    assert list(out.iterdir()) == [out / "bundle"]
    with largest_file(limit), pytest.raises(ExportError, match="nothing was written there"):
        export(source, out / "second")
    assert list(out.iterdir()) == [out / "bundle"]


def test_a_disk_that_is_too_small_is_said_before_tracing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(pipeline, "trace_component", lambda *_: pytest.fail("traced first"))
    with pytest.raises(ExportError, match=r"needs .* GB, but the disk of .* has 0.00 GB free"):
        export(source, tmp_path / "out" / "bundle")
    assert not (tmp_path / "out").exists()


def test_an_interrupt_while_weights_are_written_leaves_the_old_bundle(
    source: Path,
    bundle: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    shutil.copytree(bundle("one-layer"), out / "bundle")
    before = snapshot(out)
    written: list[str] = []

    def interrupt(self: tqdm.tqdm, count: int) -> None:
        written.extend(path.name for path in out.glob(".bundle.partial-*/*.data"))
        if written:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(tqdm.tqdm, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(source, out / "bundle", force=True)
    assert written == ["embedding.onnx.data"], "the interrupt came before anything was written"
    assert snapshot(out) == before
    assert list(out.iterdir()) == [out / "bundle"]


def test_outputs_that_cannot_be_created_are_a_sentence(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    for output in (tmp_path / "file" / "bundle", tmp_path / ("x" * 300)):
        with pytest.raises(ExportError, match=r"^writing .* failed: .*nothing was written there"):
            export(source, output)
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_bad_weight_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (shard,) = source.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["model.language_model.embed_tokens.weight"][5, 5] = np.nan
    save_file(tensors, shard)
    with pytest.raises(ExportError, match=r"embed_tokens.weight holds NaN"):
        export(source, tmp_path / "out" / "bundle")
    assert not (tmp_path / "out").exists()


def test_an_output_beside_or_inside_the_checkpoint_never_harms_it(source: Path) -> None:
    before = snapshot(source)
    for output in (source, source.parent):
        with pytest.raises(ExportError, match=r"holds the checkpoint .*, so it is left alone"):
            export(source, output, force=True)
    assert snapshot(source) == before
    export(source, source / "bundle")
    after = snapshot(source)
    assert {name: after[name] for name in before} == before
