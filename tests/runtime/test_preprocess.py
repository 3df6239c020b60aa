"""Processor files that belong to another model are refused when they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen3vl_export.bundle import Bundle
from qwen3vl_export.errors import BundleError
from qwen3vl_runtime.preprocess import Preprocessor


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize(
    "settings",
    [
        {"patch_size": 8},
        {"temporal_patch_size": 1},
        {"merge_size": 1},
        # As many values a patch as the model takes, which the graph could not tell apart.
        {"patch_size": 8, "temporal_patch_size": 8},
    ],
    ids=str,
)
def test_patches_must_be_those_of_the_model(
    bundle_copy: Path, kind: str, settings: dict[str, int]
) -> None:
    bundle = Bundle.open(bundle_copy)
    name = "preprocessor_config.json" if kind == "image" else "video_preprocessor_config.json"
    path = bundle.processor / name
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(BundleError, match=f"expected the {kind} processor file .*found"):
        Preprocessor(bundle)


def test_a_processor_file_nested_beyond_reading_is_explained(bundle_copy: Path) -> None:
    bundle = Bundle.open(bundle_copy)
    (bundle.processor / "preprocessor_config.json").write_text("[" * 100_000)
    with pytest.raises(BundleError, match="expected a JSON file"):
        Preprocessor(bundle)
