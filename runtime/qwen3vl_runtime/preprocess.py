"""From chat messages to one prompt the graphs can take: pixels, token ids and positions.

Everything a checkpoint says about its inputs (tokenizer, chat template, image and video settings)
is read from the bundle's processor files once, here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwen3vl_export.bundle import Bundle
from qwen3vl_export.config import ModelConfig
from qwen3vl_export.errors import BundleError, InputError
from qwen3vl_runtime.chat_template import ChatTemplate
from qwen3vl_runtime.image_processor import ImageProcessorConfig, VisualInput, preprocess_image
from qwen3vl_runtime.media import load_frames, load_image
from qwen3vl_runtime.messages import (
    ImagePart,
    VideoPart,
    VisualFeatures,
    parse_messages,
    visual_parts,
)
from qwen3vl_runtime.positions import RopeIndex, rope_index
from qwen3vl_runtime.prompt import PromptLayout, Visual, layout_prompt
from qwen3vl_runtime.sampling_params import GenerationDefaults
from qwen3vl_runtime.tokenizer import Tokenizer, read_json_object
from qwen3vl_runtime.video_config import VideoProcessorConfig
from qwen3vl_runtime.video_processor import preprocess_video

__all__ = ["PreparedPrompt", "Preprocessor"]


@dataclass(frozen=True, eq=False)
class PreparedPrompt:
    """One conversation, ready to run.

    Attributes:
        text: The rendered chat, before placeholders are expanded.
        layout: Token ids and the place of each visual token.
        rope: M-RoPE positions.
        visuals: Pixels, or features computed earlier, in order of appearance.
    """

    text: str
    layout: PromptLayout
    rope: RopeIndex
    visuals: tuple[VisualInput | VisualFeatures, ...]

    @property
    def num_tokens(self) -> int:
        """Prompt length, placeholders expanded."""
        return len(self.layout.input_ids)


class Preprocessor:
    """Prepares prompts for one checkpoint."""

    def __init__(self, bundle: Bundle, *, allow_urls: bool = False) -> None:
        """Read the bundle's processor files.

        Raises:
            BundleError: A file is missing, unreadable, or made for another vision encoder.
            CheckpointError, UnsupportedModelError: A setting in them cannot be used.
        """
        folder = bundle.processor
        self.config: ModelConfig = bundle.config
        self.tokenizer = Tokenizer.from_processor_files(folder)
        self.defaults = _generation_defaults(bundle, self.tokenizer)
        self._template = ChatTemplate.from_processor_files(folder)
        self._image = ImageProcessorConfig.from_dict(
            read_json_object(folder / "preprocessor_config.json")
        )
        self._video = VideoProcessorConfig.from_dict(
            read_json_object(folder / "video_preprocessor_config.json")
        )
        for kind, settings in (("image", self._image), ("video", self._video)):
            _check_patches(kind, settings, bundle)
        self._allow_urls = allow_urls

    def prepare(self, messages: Sequence[Mapping[str, Any]]) -> PreparedPrompt:
        """Load, resize and lay out one conversation.

        Args:
            messages: Chat messages as `messages.parse_messages` takes them.

        Raises:
            InputError: A message, image or video cannot be used.
        """
        parsed = parse_messages(messages)
        visuals = tuple(self._load(part) for part in visual_parts(parsed))
        text = self._template.render(parsed)
        kinds = [_kind(part) for part in visual_parts(parsed)]
        layout = layout_prompt(
            text,
            [
                Visual(kind, visual.grid_thw, visual.timestamps or ())
                for kind, visual in zip(kinds, visuals, strict=True)
            ],
            self.tokenizer,
            self.config,
        )
        grids = [(kind, visual.grid_thw) for kind, visual in zip(kinds, visuals, strict=True)]
        rope = rope_index(
            layout.token_types,
            [grid for kind, grid in grids if kind == "image"],
            [grid for kind, grid in grids if kind == "video"],
            self.config.vision.spatial_merge_size,
        )
        return PreparedPrompt(text, layout, rope, visuals)

    def _load(self, part: ImagePart | VideoPart) -> VisualInput | VisualFeatures:
        if part.features is not None:
            self._check_features(part.features)
            return part.features
        if isinstance(part, ImagePart):
            image = load_image(part.source, allow_urls=self._allow_urls)
            return preprocess_image(
                image, self._image, min_pixels=part.min_pixels, max_pixels=part.max_pixels
            )
        frames = load_frames(part.source, raw_fps=part.raw_fps, allow_urls=self._allow_urls)
        return preprocess_video(
            frames,
            self._video,
            fps=part.fps,
            num_frames=part.num_frames,
            do_sample_frames=part.do_sample_frames,
            min_pixels=part.min_pixels,
            max_pixels=part.max_pixels,
        )

    def _check_features(self, features: VisualFeatures) -> None:
        config = self.config
        tokens = math.prod(features.grid_thw) // config.vision.merge_unit
        width = config.text.hidden_size * (1 + config.num_deepstack_levels)
        if features.embeds.shape != (tokens, width):
            raise InputError(
                f"precomputed features of grid {list(features.grid_thw)} must have shape "
                f"[{tokens}, {width}] (visual tokens, hidden_size * (1 + DeepStack levels)), "
                f"found {list(features.embeds.shape)}"
            )


def _check_patches(kind: str, settings: ImageProcessorConfig, bundle: Bundle) -> None:
    """Patches cut otherwise than the encoder was trained on may fit it and mean something else."""
    vision = bundle.config.vision
    expected = (vision.patch_size, vision.temporal_patch_size, vision.spatial_merge_size)
    found = (settings.patch_size, settings.temporal_patch_size, settings.merge_size)
    if found != expected:
        raise BundleError(
            f"expected the {kind} processor file of {bundle.path} to have the model's patch_size, "
            f"temporal_patch_size and merge_size {expected}, found {found}; take the file from the "
            "same checkpoint as the model and export again"
        )


def _kind(part: ImagePart | VideoPart) -> Any:
    return "image" if isinstance(part, ImagePart) else "video"


def _generation_defaults(bundle: Bundle, tokenizer: Tokenizer) -> GenerationDefaults:
    """The checkpoint's generation config; without one, its tokenizer still tells where to end."""
    path = bundle.processor / "generation_config.json"
    defaults = GenerationDefaults.from_dict(read_json_object(path) if path.is_file() else {})
    return replace(defaults, eos_token_ids=defaults.eos_token_ids or tokenizer.eos_token_ids)
