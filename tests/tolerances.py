"""How far a bundle may be from transformers in fp32, by the bundle's precision."""

from __future__ import annotations

__all__ = ["LOGITS", "LOGITS_RMS", "LOGITS_STD", "VISION"]

#: Standard deviation of the logits that the tolerances are for: that of the random checkpoints.
#: The trained one's is 7, and its differences are scaled down accordingly.
LOGITS_STD = 4.0

#: Largest absolute difference of logits.
#: fp32: only the order of additions differs. Seen: 3e-5 (random checkpoints), 8e-5 (the trained one
#: on the fixed conversations). On noise pictures at large the trained one's outlier channels make
#: transformers itself differ from its own fp64 by up to 3e-4 (median 1.5e-5), the bundle by 1e-4
#: (median 1.2e-5); that is why generated conversations run on random checkpoints only.
#: fp16: every activation is rounded to 11 bits. A logit of 16 to 32 is then a multiple of 1/64,
#: which alone may be off by 8e-3. Seen: 2.3e-2 (random), 3.2e-2 (trained); transformers' own fp16
#: is off by up to 3.7e-2 and 9.3e-2 on the same prompts, and a test holds the bundle below that.
LOGITS = {"fp32": 1e-4, "fp16": 5e-2}
#: Root mean square, as the largest of a million differences is an unlucky one; 3.6e-3 was seen.
LOGITS_RMS = {"fp16": 5e-3}
#: Largest difference of visual features as a fraction of the largest feature, which is about 3 in
#: random checkpoints and 30 in the trained one; 2.5e-6 and 9e-4 were seen.
VISION = {"fp32": 1e-5, "fp16": 2e-3}
