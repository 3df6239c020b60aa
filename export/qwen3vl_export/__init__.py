"""Export of Qwen3-VL checkpoints to ONNX bundles; importing it never imports torch."""

from __future__ import annotations

from qwen3vl_export.bundle import Bundle
from qwen3vl_export.config import ModelConfig, TextConfig, VisionConfig
from qwen3vl_export.errors import Qwen3VLError

__all__ = ["Bundle", "ModelConfig", "Qwen3VLError", "TextConfig", "VisionConfig", "__version__"]

__version__ = "0.1.0"
