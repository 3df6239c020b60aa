"""The I/O contract of the three graphs: every tensor's name, shape, dtype and meaning.

The exporter names its graphs from here, the runtime binds by it, the bundle's manifest stores it,
and the README's tables are generated from it, so a name or a shape is written in one place only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from qwen3vl_export.config import ModelConfig
from qwen3vl_export.errors import BundleError

__all__ = [
    "COMPONENTS",
    "DTYPES",
    "EXTRA_COMPONENTS",
    "FLOAT",
    "OPSET",
    "PRECISIONS",
    "TARGETS",
    "ComponentContract",
    "TensorSpec",
    "component_contract",
    "contract_markdown",
    "past_names",
    "present_names",
]

OPSET = 24
COMPONENTS = ("vision", "embedding", "decoder")

#: Graphs that a bundle may have besides, and the component whose contract each shares:
#: `decoder_prefill` runs calls of many tokens over the decoder's cache.
EXTRA_COMPONENTS = {"decoder_prefill": "decoder"}

#: ONNX names of the graph's float type by precision; weights of linears may be integers.
PRECISIONS = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int8": "float32",
    "int4": "float32",
}

#: What `export --target` accepts, and the precisions of each; the first is its default.
TARGETS = {
    "onnx": ("fp16", "fp32", "bf16"),
    "ort-cpu": ("fp32", "int8", "int4"),
}

#: Stands in a `TensorSpec` for the precision's float type.
FLOAT = "F"
DTYPES = ("int64", *dict.fromkeys(PRECISIONS.values()))


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: a string dimension is symbolic (any size), an integer is fixed."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    meaning: str = ""

    def with_float(self, dtype: str) -> TensorSpec:
        """The same tensor with the placeholder float type made concrete."""
        concrete = dtype if self.dtype == FLOAT else self.dtype
        return TensorSpec(self.name, self.shape, concrete, self.meaning)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, as stored in the manifest."""
        return {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TensorSpec:
        """Parse the JSON form; raises BundleError when it is malformed."""
        try:
            shape = tuple(data["shape"])
            if not all(type(dim) in (int, str) for dim in shape):
                raise TypeError
            return cls(str(data["name"]), shape, str(data["dtype"]))
        except (KeyError, TypeError) as error:
            raise BundleError(f"the manifest describes a tensor wrongly: {data!r}") from error


@dataclass(frozen=True)
class ComponentContract:
    """Inputs and outputs of one graph, in graph order."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def with_precision(self, precision: str) -> ComponentContract:
        """The contract with the float type of `precision` (a key of `PRECISIONS`)."""
        dtype = PRECISIONS[precision]
        return ComponentContract(
            self.name,
            tuple(spec.with_float(dtype) for spec in self.inputs),
            tuple(spec.with_float(dtype) for spec in self.outputs),
        )


def component_contract(component: str, config: ModelConfig) -> ComponentContract:
    """Contract of a component for a model, with `FLOAT` left open.

    Args:
        component: One of `COMPONENTS`, or a key of `EXTRA_COMPONENTS`.
        config: Shape of the model.
    """
    kind = EXTRA_COMPONENTS.get(component, component)
    build = {"vision": _vision, "embedding": _embedding, "decoder": _decoder}[kind]
    return replace(build(config), name=component)


def past_names(layer: int) -> tuple[str, str]:
    """Names of the key and value cache inputs of a decoder layer."""
    return f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"


def present_names(layer: int) -> tuple[str, str]:
    """Names of the key and value cache outputs of a decoder layer."""
    return f"present.{layer}.key", f"present.{layer}.value"


def _vision(config: ModelConfig) -> ComponentContract:
    vision = config.vision
    half = vision.head_dim // 2
    levels = vision.num_deepstack_levels
    inputs = (
        TensorSpec(
            "pixel_values",
            ("frames", "patches", vision.patch_dim),
            FLOAT,
            "flattened patches of equally sized frames, in merge order; one frame is one "
            "temporal patch and one attention window",
        ),
        TensorSpec(
            "pos_embed_indices", (4, "patches"), "int64", "rows of the learned position grid"
        ),
        TensorSpec(
            "pos_embed_weights", (4, "patches"), FLOAT, "bilinear weights of those four rows"
        ),
        TensorSpec("rotary_cos", ("patches", half), FLOAT, "height angles, then width angles"),
        TensorSpec("rotary_sin", ("patches", half), FLOAT, "likewise"),
    )
    outputs = [
        TensorSpec(
            "image_embeds",
            ("frames", "merged_patches", config.text.hidden_size),
            FLOAT,
            f"visual tokens; merged_patches = patches / {vision.merge_unit}",
        )
    ]
    if levels:
        outputs.append(
            TensorSpec(
                "deepstack_embeds",
                (levels, "frames", "merged_patches", config.text.hidden_size),
                FLOAT,
                "DeepStack features, one slice a level",
            )
        )
    return ComponentContract("vision", inputs, tuple(outputs))


def _embedding(config: ModelConfig) -> ComponentContract:
    hidden = config.text.hidden_size
    levels = config.num_deepstack_levels
    inputs = [
        TensorSpec("input_ids", ("batch", "seq"), "int64", "token ids"),
        TensorSpec(
            "visual_indices",
            ("batch", "seq"),
            "int64",
            "-1 on text, else the row of visual_embeds that replaces the token's embedding",
        ),
        TensorSpec(
            "visual_embeds",
            ("visual", hidden),
            FLOAT,
            "visual tokens of the whole call (one unused row when there are none)",
        ),
    ]
    outputs = [TensorSpec("inputs_embeds", ("batch", "seq", hidden), FLOAT, "merged embeddings")]
    if levels:
        inputs.append(
            TensorSpec(
                "deepstack_visual_embeds",
                (levels, "visual", hidden),
                FLOAT,
                "DeepStack features of the same rows",
            )
        )
        outputs.append(
            TensorSpec(
                "deepstack_embeds",
                (levels, "batch", "seq", hidden),
                FLOAT,
                "DeepStack features by position; exact zeros on text",
            )
        )
    return ComponentContract("embedding", tuple(inputs), tuple(outputs))


def _decoder(config: ModelConfig) -> ComponentContract:
    text = config.text
    levels = config.num_deepstack_levels
    cache_shape = ("batch", text.num_key_value_heads, "capacity", text.head_dim)
    inputs = [
        TensorSpec(
            "inputs_embeds",
            ("batch", "seq", text.hidden_size),
            FLOAT,
            "the embedding graph's output",
        )
    ]
    if levels:
        inputs.append(
            TensorSpec(
                "deepstack_embeds",
                (levels, "batch", "seq", text.hidden_size),
                FLOAT,
                "level i is added after decoder layer i",
            )
        )
    inputs += [
        TensorSpec(
            "position_ids", (3, "batch", "seq"), "int64", "temporal, height and width positions"
        ),
        TensorSpec("write_indices", ("batch",), "int64", "tokens already cached in each row"),
        TensorSpec(
            "logits_indices",
            ("batch", "num_logits"),
            "int64",
            "positions of this call to score",
        ),
    ]
    outputs = [
        TensorSpec(
            "logits", ("batch", "num_logits", text.vocab_size), "float32", "scores, not softmaxed"
        )
    ]
    for layer in range(text.num_hidden_layers):
        meaning = "KV cache; past and present are one buffer, written in place"
        inputs += [TensorSpec(name, cache_shape, FLOAT, meaning) for name in past_names(layer)]
        outputs += [TensorSpec(name, cache_shape, FLOAT, meaning) for name in present_names(layer)]
    return ComponentContract("decoder", tuple(inputs), tuple(outputs))


def contract_markdown(config: ModelConfig) -> str:
    """The contract of a model as Markdown tables; cache tensors are shown for layer 0 only."""
    lines: list[str] = []
    for component in COMPONENTS:
        contract = component_contract(component, config)
        lines += [f"**{component}.onnx**", "", "| | name | shape | dtype | meaning |"]
        lines.append("|---|---|---|---|---|")
        for direction, specs in (("in", contract.inputs), ("out", contract.outputs)):
            lines += [_markdown_row(direction, spec) for spec in specs if _is_shown(spec)]
        lines.append("")
    return "\n".join(lines)


def _is_shown(spec: TensorSpec) -> bool:
    layer = spec.name.split(".")[1:2]
    return layer in ([], ["0"])


def _markdown_row(direction: str, spec: TensorSpec) -> str:
    shape = ", ".join(str(dim) for dim in spec.shape)
    return f"| {direction} | `{spec.name}` | [{shape}] | {spec.dtype} | {spec.meaning} |"
