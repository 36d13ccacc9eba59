"""How the code is cut: modules, their sizes and importers, and the files that one step passes.

    python benchmarks/structure.py

A step is what happens between two steps of the optimizer in `torchcram train`: the next batch, the
passes of CrAM+, the update, and what is logged of it. Only files of this library count.
"""

from __future__ import annotations

import ast
import contextlib
import io
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torchcram
from torchcram import CrAM

SOURCES = Path(torchcram.__file__).parent
RECIPE = "digits/convnet-digits/cram-plus-multi"


def modules() -> dict[str, Path]:
    """Returns the files of all modules, packages included, by name."""
    return {
        ".".join(("torchcram", *path.relative_to(SOURCES).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in sorted(SOURCES.rglob("*.py"))
    }


def importers(known: dict[str, Path]) -> dict[str, set[str]]:
    """Returns the modules that import each module, by name; imports inside functions count."""
    users: dict[str, set[str]] = defaultdict(set)
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.module not in known:
                continue
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                users[inner if inner in known else node.module].add(name)
    return users


class StepTrace:
    """Files of this library that run between the second and the third step of the optimizer."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._steps = 0

    def install(self) -> None:
        """Counts the steps of every CrAM from now on."""
        step = CrAM.step

        def counted(optimizer: CrAM, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            result = step(optimizer, *args, **kwargs)
            self._steps += 1
            sys.setprofile(self._note if self._steps == 2 else None)
            return result

        CrAM.step = counted  # type: ignore[assignment,method-assign]

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(SOURCES)):
            self.files.add(file.removeprefix(f"{SOURCES}/"))


def trace_a_step() -> set[str]:
    """Trains for an epoch and returns the files that a step passes."""
    from torchcram.cli import app

    trace = StepTrace()
    trace.install()
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        words = ["train", RECIPE, "--epochs", "1", "--device", "cpu", "--out", f"{folder}/run"]
        with contextlib.suppress(SystemExit):
            app(words)
    return trace.files


def main() -> None:
    """Prints the counts."""
    known = modules()
    users = importers(known)
    files = {name: path for name, path in known.items() if path.name != "__init__.py"}
    sizes = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    largest = max(sizes, key=lambda name: sizes[name])
    print(f"modules: {len(files)}, and {len(known) - len(files)} packages")
    print(f"lines per module: {sum(sizes.values()) / len(sizes):.0f} on average")
    print(f"largest module: {largest}, {sizes[largest]} lines")
    print(f"modules with one importer: {sum(len(users[name]) == 1 for name in files)}")
    passed = sorted(trace_a_step())
    print(f"files that a step passes: {len(passed)}")
    for file in passed:
        print(f"  {file}")


if __name__ == "__main__":
    main()
