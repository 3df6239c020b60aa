"""Largest absolute differences from transformers in fp32, by the bundle's precision.

Logits here have a standard deviation of about 4. In fp32 only the order of additions differs; in
fp16 every weight and activation is rounded to 11 bits.
"""

from __future__ import annotations

__all__ = ["LOGITS", "VISION"]

LOGITS = {"fp32": 1e-4, "fp16": 1e-2}
VISION = {"fp32": 1e-4, "fp16": 2e-2}
