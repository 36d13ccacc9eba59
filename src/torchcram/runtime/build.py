"""Builds the kernels in place: `python -m torchcram.runtime.build`."""

import sys

from torchcram.native.compiling import build

if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
