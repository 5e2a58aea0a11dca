"""Tap: attention seen below autograd, where there are only a few forms of it.

One mode of torch, open for the window alone and in its thread alone, sees every operator: fused
attention by the names in its schema, softmaxes with the products that flowed into them.
"""

from geomon.capture.tap.columns import Columns, Projection
from geomon.capture.tap.mode import Tap, TapObserver
from geomon.capture.tap.provenance import AttentionWeights, Product, Provenance, Stream

__all__ = [
    "Columns",
    "Product",
    "Projection",
    "Provenance",
    "Stream",
    "Tap",
    "TapObserver",
    "AttentionWeights",
]
