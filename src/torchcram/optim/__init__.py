"""The optimizer and its update rules."""

from torchcram.optim.cram import CrAM
from torchcram.optim.rules import C_SAM, CRAM, CRAM_PLUS, RULES, SAM, TOPK, TOPK_PLUS, UpdateRule

__all__ = ["CRAM", "CRAM_PLUS", "C_SAM", "RULES", "SAM", "TOPK", "TOPK_PLUS", "CrAM", "UpdateRule"]
