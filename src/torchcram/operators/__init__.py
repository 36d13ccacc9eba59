"""Compression operators C, one small file each."""

from torchcram.operators.base import Operator, Sparsifier
from torchcram.operators.chain import Chain
from torchcram.operators.nm import NM
from torchcram.operators.parse import as_operator, parse_operator, register_operator
from torchcram.operators.quantize import Quantize
from torchcram.operators.topk import GlobalTopK, RowTopK, UniformTopK

__all__ = [
    "NM",
    "Chain",
    "GlobalTopK",
    "Operator",
    "Quantize",
    "RowTopK",
    "Sparsifier",
    "UniformTopK",
    "as_operator",
    "parse_operator",
    "register_operator",
]
