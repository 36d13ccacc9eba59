"""Pruners: operators that look at gradients or activations first, one small file each."""

from torchcram.pruners.base import BoundPruner, Calibration, Pruner, bind
from torchcram.pruners.obs import Obs
from torchcram.pruners.parse import parse_pruner, prune_, register_pruner
from torchcram.pruners.sparsegpt import SparseGPT
from torchcram.pruners.wanda import Wanda

__all__ = [
    "BoundPruner",
    "Calibration",
    "Obs",
    "Pruner",
    "SparseGPT",
    "Wanda",
    "bind",
    "parse_pruner",
    "prune_",
    "register_pruner",
]
