"""Hugging Face transformers as the reference: the same conversation, answered by the original.

Nothing of the runtime under test is used for text and images: the chat template, the tokenizer,
the image processor, the positions and the model are transformers' own. Videos are the exception:
transformers' video processor needs torchvision, so frames are resized and cut by the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen3vl_runtime.image_processor import VisualInput
from qwen3vl_runtime.media import load_frames, load_image
from qwen3vl_runtime.tokenizer import read_json_object
from qwen3vl_runtime.video_config import VideoProcessorConfig
from qwen3vl_runtime.video_processor import preprocess_video

__all__ = ["Reference"]

_SAMPLING_KEYS = ("fps", "num_frames", "do_sample_frames", "min_pixels", "max_pixels")


class Reference:
    """A checkpoint in transformers, greedy decoding."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32) -> None:
        """Load the model, in eval mode, on the CPU."""
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint, dtype=dtype)
        self.model.requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._image_processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
        self._video_config = VideoProcessorConfig.from_dict(
            read_json_object(checkpoint / "video_preprocessor_config.json")
        )

    @torch.inference_mode()
    def generate(self, messages: Sequence[Mapping[str, Any]], max_new_tokens: int) -> list[int]:
        """Greedy token ids of the answer, the end-of-sequence token included."""
        inputs = self.inputs(messages)
        output = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return [int(token) for token in output[0, inputs["input_ids"].shape[1] :]]

    @torch.inference_mode()
    def logits(
        self, messages: Sequence[Mapping[str, Any]], answer: Sequence[int] = ()
    ) -> torch.Tensor:
        """Teacher-forced logits float32 [prompt + answer, vocab], computed in one call."""
        inputs = self.inputs(messages)
        ids = torch.cat([inputs["input_ids"], torch.tensor([list(answer)], dtype=torch.int64)], 1)
        inputs |= {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": self._token_types(ids),
        }
        logits: torch.Tensor = self.model(**inputs, use_cache=False).logits[0]
        return logits.float()

    def inputs(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Model inputs of one conversation: ids, pixels and grids."""
        parts = [
            part
            for message in messages
            if not isinstance(message["content"], str)
            for part in message["content"]
        ]
        images = [self._image(part) for part in parts if "image" in part]
        videos = [self._video(part) for part in parts if "video" in part]
        text = self.tokenizer.apply_chat_template(
            _as_typed(messages), tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        ids = self.tokenizer(
            self._expand(text, images, videos), return_tensors="pt", add_special_tokens=False
        )["input_ids"]
        inputs = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": self._token_types(ids),
        }
        if images:
            inputs["pixel_values"] = torch.cat([image["pixel_values"] for image in images])
            inputs["image_grid_thw"] = torch.cat([image["image_grid_thw"] for image in images])
        if videos:
            pixels = [torch.from_numpy(video.pixel_values).flatten(0, 1) for video in videos]
            inputs["pixel_values_videos"] = torch.cat(pixels)  # [frames * patches, patch_dim]
            inputs["video_grid_thw"] = torch.tensor([video.grid_thw for video in videos])
        return inputs

    def _image(self, part: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        processor = self._image_processor
        size = {
            "shortest_edge": part.get("min_pixels", processor.size["shortest_edge"]),
            "longest_edge": part.get("max_pixels", processor.size["longest_edge"]),
        }
        processed: Mapping[str, torch.Tensor] = processor(
            images=[load_image(part["image"])], size=size, return_tensors="pt"
        )
        return processed

    def _video(self, part: Mapping[str, Any]) -> VisualInput:
        frames = load_frames(part["video"], raw_fps=part.get("raw_fps"))
        options = {key: part[key] for key in _SAMPLING_KEYS if key in part}
        return preprocess_video(frames, self._video_config, **options)

    def _expand(
        self, text: str, images: Sequence[Mapping[str, torch.Tensor]], videos: Sequence[VisualInput]
    ) -> str:
        """Replace each placeholder by as many as it has visual tokens, timestamps between."""
        merge_unit = self._image_processor.merge_size**2
        for image in images:
            count = int(image["image_grid_thw"].prod()) // merge_unit
            text = text.replace("<|image_pad|>", "<|placeholder|>" * count, 1)
        text = text.replace("<|placeholder|>", "<|image_pad|>")
        for video in videos:
            _, height, width = video.grid_thw
            pads = "<|placeholder|>" * (height * width // merge_unit)
            spans = "".join(
                f"<{seconds:.1f} seconds><|vision_start|>{pads}<|vision_end|>"
                for seconds in video.timestamps or ()
            )
            text = text.replace("<|vision_start|><|video_pad|><|vision_end|>", spans, 1)
        return text.replace("<|placeholder|>", "<|video_pad|>")

    def _token_types(self, ids: torch.Tensor) -> torch.Tensor:
        """0 on text, 1 on image, 2 on video placeholders."""
        config = self.model.config
        types = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        assert isinstance(types, torch.Tensor)
        return types


def _as_typed(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose parts hold nothing but what a chat template reads."""
    typed = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                {"type": "text", "text": part["text"]} if "text" in part else {"type": part["type"]}
                for part in content
            ]
        typed.append({"role": message["role"], "content": content})
    return typed
