"""Torch-free runtime: a bundle's graphs, images, video and text in, tokens out."""

from __future__ import annotations

from qwen3vl_runtime.generation import GenerationResult, StreamChunk
from qwen3vl_runtime.ort_runner import ORTRunner
from qwen3vl_runtime.sampling_params import SamplingParams
from qwen3vl_runtime.timing import GenerationTiming

__all__ = [
    "GenerationResult",
    "GenerationTiming",
    "ORTRunner",
    "SamplingParams",
    "StreamChunk",
]
