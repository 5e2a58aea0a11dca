"""Tap: see attention below autograd, where it takes only a few forms.

One torch mode, open only during the window and in its thread, sees every operator: fused attention
by the names in its schema, and softmaxes with the products that flowed into them.
"""

from geomon.capture.tap.columns import Columns, Projection
from geomon.capture.tap.mode import Tap, TapObserver
from geomon.capture.tap.outputs import HeadColumns, Shown
from geomon.capture.tap.plan import DepartedError, Known, Learner, Origins, Plan, Plans, form_of
from geomon.capture.tap.provenance import AttentionWeights, Product, Provenance
from geomon.capture.tap.stream import Stream

__all__ = [
    "Columns",
    "DepartedError",
    "HeadColumns",
    "Known",
    "Learner",
    "Origins",
    "Plan",
    "Plans",
    "form_of",
    "Product",
    "Projection",
    "Provenance",
    "Shown",
    "Stream",
    "Tap",
    "TapObserver",
    "AttentionWeights",
]
