"""The optimizer, its update rules, and whole steps as CUDA graphs."""

from torchcram.optim.cram import CrAM
from torchcram.optim.graphed_step import GraphedStep
from torchcram.optim.rules import C_SAM, CRAM, CRAM_PLUS, RULES, SAM, TOPK, TOPK_PLUS, UpdateRule

__all__ = [
    "CRAM",
    "CRAM_PLUS",
    "C_SAM",
    "RULES",
    "SAM",
    "TOPK",
    "TOPK_PLUS",
    "CrAM",
    "GraphedStep",
    "UpdateRule",
]
