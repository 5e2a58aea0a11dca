"""What the experiments share: claims of papers beside what is measured, and means over seeds."""

from recipes.study.claim import Claim, load_claims, save_claims
from recipes.study.seeds import Estimate, estimate

__all__ = ["Claim", "Estimate", "estimate", "load_claims", "save_claims"]
