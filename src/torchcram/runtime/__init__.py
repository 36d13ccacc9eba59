"""Running compressed models fast.

`prepare(model)` returns a copy whose sparse layers run on kernels of our own on the CPU.
"""

from torchcram.kernels.cpu.library import available
from torchcram.runtime.cpu.candidates import Choice
from torchcram.runtime.cpu.prepare import prepare, report

__all__ = ["Choice", "available", "prepare", "report"]
