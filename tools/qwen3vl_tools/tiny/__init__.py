"""A tiny trained Qwen3-VL: the bundled checkpoint, and what made and measures it.

Importing this package imports nothing heavy. `scenes` draws questions about pictures and needs
only numpy and pillow; `train` and `evaluate` need torch and transformers.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHECKPOINT_DIR"]

CHECKPOINT_DIR: Path = Path(__file__).parent / "checkpoint"
