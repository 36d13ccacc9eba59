"""Triton kernels; most process a whole list of CUDA tensors in one launch.

A model has many weights, most of them small, so that one launch per tensor would take longer than
the work itself. Programs process chunks, which they look up in a table. Counts, thresholds and
masks stay on the device, so that nothing waits for the host.

The key of a value is its bit pattern without the sign. A larger magnitude has a larger key, with
infinities and NaN on top. Tensors with the same segment number are ranked together. The programs of
a selection wait for one another between its passes, which a cooperative launch makes safe.
"""

from torchcram.kernels.cuda.chunks import KEYS, layout, walk_alike
from torchcram.kernels.cuda.combine import add_scaled_, can_add_scaled, can_combine, combine_
from torchcram.kernels.cuda.int8 import MOST_ROWS, multiply_int8
from torchcram.kernels.cuda.select import keep_largest
from torchcram.kernels.cuda.zero import zero_unmasked_

__all__ = [
    "KEYS",
    "MOST_ROWS",
    "add_scaled_",
    "can_add_scaled",
    "can_combine",
    "combine_",
    "keep_largest",
    "layout",
    "multiply_int8",
    "walk_alike",
    "zero_unmasked_",
]
