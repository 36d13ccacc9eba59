"""Running compressed models fast.

`prepare(model)` returns a copy whose sparse layers run on kernels of our own on the CPU.
"""

from torchcram.native.library import available
from torchcram.runtime.layers import Choice
from torchcram.runtime.prepare import prepare, report

__all__ = ["Choice", "available", "prepare", "report"]
