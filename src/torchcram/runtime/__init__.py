"""Running compressed models fast.

`prepare(model)` returns a copy whose sparse layers run on torchcram's kernels for the CPU.
"""

from torchcram.kernels.cpu.library import available
from torchcram.runtime.cpu.activation_memory import empty_cache
from torchcram.runtime.cpu.generation import prepare_generation
from torchcram.runtime.cpu.prepare import prepare
from torchcram.runtime.cpu.replace_layers import Choice
from torchcram.runtime.cpu.reports import report

__all__ = ["Choice", "available", "empty_cache", "prepare", "prepare_generation", "report"]
