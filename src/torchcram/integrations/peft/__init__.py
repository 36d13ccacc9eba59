"""CrAM for LoRA through peft; it compresses the merged weight, which will be deployed."""

from torchcram.integrations.peft.layers import merged_weights
from torchcram.integrations.peft.merge import (
    HeldLoraMasks,
    hold_lora_masks,
    merge_sparse,
    merge_sparse_,
    merged_model,
)
from torchcram.integrations.peft.optimizer import LoraCrAM

__all__ = [
    "HeldLoraMasks",
    "LoraCrAM",
    "hold_lora_masks",
    "merge_sparse",
    "merge_sparse_",
    "merged_model",
    "merged_weights",
]
