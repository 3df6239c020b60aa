"""A drawn question as the chat messages that a runner takes."""

from __future__ import annotations

from typing import Any

from qwen3vl_tools.tiny.samples import Sample

__all__ = ["as_messages"]


def as_messages(sample: Sample) -> list[dict[str, Any]]:
    """Images, then the video, then the question, in one user message; every frame is used."""
    content: list[dict[str, Any]] = [{"type": "image", "image": image} for image in sample.images]
    if sample.video is not None:
        content.append(
            {
                "type": "video",
                "video": list(sample.video.frames),
                "raw_fps": sample.video.fps,
                "do_sample_frames": False,
            }
        )
    content.append({"type": "text", "text": sample.question})
    return [{"role": "user", "content": content}]
