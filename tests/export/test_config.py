"""`config.json` parsing, held against transformers' own configuration class.

A value that is read under the wrong name, defaulted differently or silently ignored changes
answers without an error, so every parsed field is compared and every unsupported kind is refused.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.shapes import RANDOM_SHAPES
from transformers import Qwen3VLConfig

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.errors import CheckpointError, Qwen3VLError, UnsupportedModelError
from qwen3vl_tools.random_checkpoint import PRESETS, make_config

_MISSING = object()


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Consistent configs in which every number is drawn."""
    counts, sizes = st.integers(1, 12), st.integers(1, 5000)
    heads, depth, layers = draw(counts), draw(st.integers(1, 40)), draw(st.integers(1, 40))
    kv_heads, half = draw(counts), draw(st.integers(1, 128))
    height = draw(st.integers(0, half))
    width = draw(st.integers(0, half - height))
    hidden = draw(sizes)
    vocab = draw(sizes)
    tokens = st.integers(0, vocab - 1)
    levels = draw(st.permutations(range(depth)))[: draw(st.integers(0, min(depth, layers)))]
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": draw(st.booleans()),
        "image_token_id": draw(tokens),
        "video_token_id": draw(tokens),
        "vision_start_token_id": draw(tokens),
        "vision_end_token_id": draw(tokens),
        "vision_config": {
            "depth": depth,
            "hidden_size": 4 * heads * draw(counts),
            "intermediate_size": draw(sizes),
            "num_heads": heads,
            "in_channels": draw(counts),
            "patch_size": draw(counts),
            "temporal_patch_size": draw(counts),
            "spatial_merge_size": draw(counts),
            "out_hidden_size": hidden,
            "num_position_embeddings": draw(counts) ** 2,
            "deepstack_visual_indexes": levels,
            "hidden_act": draw(st.sampled_from(["gelu", "gelu_pytorch_tanh"])),
            "rope_parameters": {"rope_type": "axial", "rope_theta": draw(st.floats(10, 1e7))},
        },
        "text_config": {
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": draw(sizes),
            "num_hidden_layers": layers,
            "num_attention_heads": kv_heads * draw(counts),
            "num_key_value_heads": kv_heads,
            "head_dim": 2 * half,
            "max_position_embeddings": draw(sizes),
            "rms_norm_eps": draw(st.floats(1e-8, 1e-3)),
            "attention_bias": draw(st.booleans()),
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [half - height - width, height, width],
                "rope_theta": draw(st.floats(10, 1e7)),
                "rope_type": "default",
            },
        },
    }


def assert_as_transformers(config: dict[str, Any]) -> None:
    """Compare every parsed field with what transformers makes of the same file."""
    ours = ModelConfig.from_dict(copy.deepcopy(config))
    theirs = Qwen3VLConfig(**copy.deepcopy(config))
    text_rope = theirs.text_config.rope_parameters
    special = {
        ("vision", "rope_theta"): theirs.vision_config.rope_parameters["rope_theta"],
        ("text", "rope_theta"): text_rope["rope_theta"],
        ("text", "mrope_section"): tuple(text_rope.get("mrope_section", (24, 20, 20))),
    }
    for name, parsed, reference in (
        ("vision", ours.vision, theirs.vision_config),
        ("text", ours.text, theirs.text_config),
        ("model", ours, theirs),
    ):
        for field in dataclasses.fields(parsed):
            if field.name in ("vision", "text"):
                continue
            value = getattr(parsed, field.name)
            expected = special.get((name, field.name), _MISSING)
            if expected is _MISSING:
                expected = getattr(reference, field.name)
            if isinstance(value, tuple):
                expected = tuple(expected)
            assert value == expected, (name, field.name)
            assert type(value) is type(expected), (name, field.name)


@given(config=configs())
@settings(deadline=None, max_examples=60)
def test_every_field_is_as_transformers_reads_it(config: dict[str, Any]) -> None:
    assert_as_transformers(config)


@pytest.mark.parametrize("name", RANDOM_SHAPES)
def test_test_shapes_are_as_transformers_reads_them(name: str) -> None:
    assert_as_transformers(RANDOM_SHAPES[name])


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_as_transformers_reads_them(preset: str) -> None:
    assert_as_transformers(make_config(preset))


@pytest.mark.parametrize(
    ("vision", "text"),
    [({"out_hidden_size": 4096}, {}), ({}, {"hidden_size": 3584})],
    ids=["vision-width-given", "text-width-given"],
)
def test_left_out_values_take_the_defaults_of_transformers(
    vision: dict[str, Any], text: dict[str, Any]
) -> None:
    assert_as_transformers({"model_type": "qwen3_vl", "vision_config": vision, "text_config": text})


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """The config as transformers 4.57 wrote it."""
    config = copy.deepcopy(config)
    rope = config["text_config"].pop("rope_parameters")
    config["text_config"]["rope_theta"] = rope.pop("rope_theta")
    config["text_config"]["rope_scaling"] = rope
    config["vision_config"].pop("rope_parameters", None)
    return config


@given(config=configs())
@settings(deadline=None, max_examples=30)
def test_both_spellings_of_the_rotary_settings_parse_alike(config: dict[str, Any]) -> None:
    config["vision_config"]["rope_parameters"]["rope_theta"] = 10000.0
    old = old_spelling(config)
    assert "rope_parameters" not in old["text_config"]
    assert ModelConfig.from_dict(old) == ModelConfig.from_dict(config)
    assert_as_transformers(old)


def test_rope_type_may_be_spelled_type() -> None:
    config = old_spelling(RANDOM_SHAPES["tied"])
    scaling = config["text_config"]["rope_scaling"]
    scaling["type"] = scaling.pop("rope_type")
    assert ModelConfig.from_dict(config) == ModelConfig.from_dict(RANDOM_SHAPES["tied"])


def test_rope_scaling_wins_over_rope_parameters_as_in_transformers() -> None:
    """A file with both is read by its `rope_scaling`; ignoring that would drop a yarn."""
    config = copy.deepcopy(RANDOM_SHAPES["tied"])
    config["text_config"]["rope_scaling"] = {
        **config["text_config"]["rope_parameters"],
        "rope_theta": 777.0,
    }
    assert ModelConfig.from_dict(config).text.rope_theta == 777.0
    assert_as_transformers(config)
    config["text_config"]["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(UnsupportedModelError, match="yarn"):
        ModelConfig.from_dict(config)


def changed(path: str, value: Any, base: str = "tied") -> dict[str, Any]:
    """A valid config with the value at a dotted path replaced, or removed."""
    config = copy.deepcopy(RANDOM_SHAPES[base])
    *parents, key = path.split(".")
    target = config
    for parent in parents:
        target = target[parent]
    if value is _MISSING:
        target.pop(key)
    else:
        target[key] = value
    return config


def test_a_null_number_of_kv_heads_means_no_grouping() -> None:
    config = changed("text_config.num_key_value_heads", None)
    assert ModelConfig.from_dict(config).text.num_key_value_heads == 4
    assert_as_transformers(config)


@pytest.mark.parametrize("rope_type", ["default", "axial"])
def test_both_names_of_the_vision_rotary_type_are_accepted(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 300.0}
    assert_as_transformers(changed("vision_config.rope_parameters", rope))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model_type", "qwen3_vl_moe", "'qwen3_vl_moe'"),
        ("model_type", "qwen2_5_vl", "'qwen2_5_vl'"),
        ("model_type", _MISSING, "None"),
        (
            "quantization_config",
            {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
            "quantised with 'fp8'; use the unquantised checkpoint",
        ),
        ("quantization_config", {"quant_method": "awq", "bits": 4}, "quantised with 'awq'"),
        ("vision_config.hidden_act", "relu", "vision_config.hidden_act .* found 'relu'"),
        ("text_config.hidden_act", "gelu", "text_config.hidden_act .* found 'gelu'"),
        ("text_config.rope_parameters.rope_type", "yarn", "found 'yarn'"),
        ("text_config.rope_parameters.rope_type", "linear", "found 'linear'"),
        ("text_config.rope_parameters.mrope_interleaved", False, "mrope_interleaved=false"),
        (
            "vision_config.rope_parameters",
            {"rope_type": "yarn", "rope_theta": 10000.0},
            "vision_config.* found 'yarn'",
        ),
    ],
)
def test_unsupported_models_are_refused_by_name(path: str, value: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_dict(changed(path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("vision_config", _MISSING, "must have an object 'vision_config'"),
        ("text_config", [], "must have an object 'text_config'"),
        ("vision_config.depth", "5", "depth must be of type int, found '5'"),
        ("vision_config.depth", 5.0, "depth must be of type int, found 5.0"),
        ("vision_config.depth", True, "depth must be of type int, found True"),
        ("text_config.vocab_size", 0, "vocab_size must be positive .*, found 0"),
        ("text_config.vocab_size", 10**18, "vocab_size must be positive and at most 16777216"),
        ("text_config.num_hidden_layers", 10**5, "num_hidden_layers must be .* at most 1024"),
        ("vision_config.depth", 1025, "depth must be positive and at most 1024, found 1025"),
        ("vision_config.patch_size", 10**6, r"patch_size \*\* 2 must be at most 16777216"),
        ("vision_config.spatial_merge_size", 10**6, r"merge_size \*\* 2 must be at most 16777216"),
        ("text_config.head_dim", 1 << 24, r"num_attention_heads \* head_dim must be at most"),
        ("image_token_id", 448, "image_token_id must be a token .*, 0 to 447, found 448"),
        ("video_token_id", -1, "video_token_id must be a token .* found -1"),
        ("vision_start_token_id", 10**30, "vision_start_token_id must be a token"),
        ("vision_end_token_id", 448, "vision_end_token_id must be a token"),
        ("text_config.attention_bias", "no", "attention_bias must be of type bool"),
        ("text_config.rms_norm_eps", "small", "rms_norm_eps"),
        ("text_config.rope_parameters", "default", "rope_parameters"),
        ("text_config.rope_parameters.rope_theta", "big", "rope_theta"),
        ("text_config.rope_parameters.rope_theta", -1.0, "rope_theta"),
        ("text_config.rope_parameters.mrope_section", 16, "mrope_section must be three"),
        ("text_config.rope_parameters.mrope_section", [8, 8], "mrope_section must be three"),
        ("vision_config.deepstack_visual_indexes", 3, "must be a list of integers"),
        ("vision_config.num_heads", 3, "hidden_size 64 must be a multiple of 4 . num_heads"),
        ("vision_config.num_position_embeddings", 255, "255 must be a square"),
        ("vision_config.out_hidden_size", 64, "out_hidden_size 64 must equal .* 96"),
        ("text_config.num_key_value_heads", 3, "must be a multiple of num_key_value_heads 3"),
        ("text_config.head_dim", 64, r"\[6, 5, 5\] must add up to half of head_dim 64"),
        ("text_config.head_dim", 33, r"half of head_dim 33"),
        ("vision_config.deepstack_visual_indexes", [0, 0], "must be different layers"),
        ("vision_config.deepstack_visual_indexes", [5], "must be different layers below"),
        ("vision_config.deepstack_visual_indexes", [-1], "must be different layers below"),
        ("text_config.num_hidden_layers", 2, "3 DeepStack levels need as many decoder layers"),
    ],
)
def test_contradictions_and_wrong_types_are_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(changed(path, value))


def _paths(config: dict[str, Any], prefix: str = "") -> list[str]:
    paths = []
    for key, value in config.items():
        paths.append(prefix + key)
        if isinstance(value, dict):
            paths += _paths(value, f"{prefix}{key}.")
    return paths


_JUNK = [None, True, "x", "", [], [1], {}, {"a": 1}, -1, 0, 1.5, float("nan"), 10**30]


@pytest.mark.parametrize("junk", _JUNK, ids=repr)
def test_junk_anywhere_is_parsed_or_refused_but_never_a_crash(junk: Any) -> None:
    paths = _paths(RANDOM_SHAPES["tied"])
    assert len(paths) > 30
    refused = 0
    for path in paths:
        try:
            ModelConfig.from_dict(changed(path, junk))
        except Qwen3VLError:
            refused += 1
    assert refused, "no value was refused: the test does not reach the parser"
