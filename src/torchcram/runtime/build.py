"""Builds the kernels in place: `python -m torchcram.runtime.build`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torchcram.kernels.cpu.compiling import LIBRARY, build


def main(arguments: list[str] | None = None) -> int:
    """Builds the kernels and returns the exit code.

    Args:
        arguments: Words of the command line; None for those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchcram.runtime.build", description="Builds the sparse kernels."
    )
    parser.add_argument(
        "target",
        nargs="?",
        type=Path,
        default=LIBRARY,
        help="library to write; by default the one that the package loads",
    )
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="with AddressSanitizer, UBSan and allocation failure on demand, for tests",
    )
    given = parser.parse_args(arguments)
    try:
        library = build(given.target, sanitize=given.sanitize, faults=given.sanitize)
    except (RuntimeError, OSError) as error:  # the latter of a folder that is read-only
        sys.stderr.write(f"the kernels were not built: {error}\n")
        return 1
    sys.stdout.write(f"{library}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
