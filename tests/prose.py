"""Checks the words of docstrings and the names of variables in the source.

An entry of `Args:`, `Attributes:`, `Raises:`, `Returns:` or `Yields:` begins with a noun and a
capital letter and ends with a full stop: "Seed of the run.", never "of the run".

    python tests/prose.py [PATH...]     prints the offences in files or folders, src by default
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "torchcram"

NAMED = ("Args:", "Arguments:", "Attributes:", "Raises:")
UNNAMED = ("Returns:", "Yields:")
ENTRY = re.compile(r"(?P<name>[\w.*`, /]+?)(?: \([^)]*\))?:(?: (?P<text>.*))?$")
PREPOSITIONS = (
    "about above across after against along among around at before behind below beneath beside "
    "between beyond by despite during except for from in inside into like near of off on onto out "
    "outside over past per since through throughout to toward towards under until up upon via "
    "with within without"
)
OTHER_HEADLESS = (
    "also and are as be because but can ditto has have hence how if is it it's likewise may must "
    "not or otherwise so than that then there they those thus unless was were what whatever when "
    "where which whichever while who whom whose why will"
)
HEADLESS = frozenset(f"{PREPOSITIONS} {OTHER_HEADLESS}".split())
NOTATION = frozenset(("w", "g", "rho"))  # symbols of the paper, in lower case wherever they stand
BANNED = frozenset(("one", "found", "place"))


def offences(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the description of everything in a file that breaks the rules.

    Args:
        path: Python file; it is parsed, not imported.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstring_offences(node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in BANNED:
            yield node.lineno, f"variable named {node.id!r}"
        if isinstance(node, ast.arg) and node.arg in BANNED:
            yield node.lineno, f"argument named {node.arg!r}"


def offences_under(paths: list[Path]) -> list[str]:
    """Returns every offence in files and folders as "path:line: description"."""
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) or [path])]
    return [
        f"{file}:{line}: {text}" for file in files for line, text in sorted(set(offences(file)))
    ]


def _docstring_offences(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[int, str]]:
    if ast.get_docstring(node, clean=False) is None:
        return
    literal = node.body[0].value  # type: ignore[attr-defined]
    for section, number, text in _entries(literal.value.expandtabs().split("\n")):
        for fault in _faults(section, text):
            yield literal.lineno + number, f"{section} {fault}: {text!r}"


def _entries(lines: list[str]) -> Iterator[tuple[str, int, str]]:
    """Yields the section, the line number and the whole description of every entry."""
    number = 0
    while number < len(lines):
        section = lines[number].strip()
        outer = _indent(lines[number])
        number += 1
        if section not in NAMED + UNNAMED:
            continue
        body = []
        while number < len(lines) and (not lines[number].strip() or _indent(lines[number]) > outer):
            if lines[number].strip():
                body.append((number, lines[number]))
            number += 1
        if section in UNNAMED:
            if body:
                yield section, body[0][0], " ".join(line.strip() for _, line in body)
            continue
        while body:
            start, first = body.pop(0)
            match = ENTRY.match(first.strip())
            text = [(match["text"] or "") if match else first.strip()]
            while body and _indent(body[0][1]) > _indent(first):
                text.append(body.pop(0)[1].strip())
            yield section, start, " ".join(text).strip()


def _faults(section: str, text: str) -> Iterator[str]:
    word = re.match(r"[\w'~]*", text)[0]  # type: ignore[index]
    if word.lower() in HEADLESS and not (section == "Raises:" and word.lower() == "if"):
        yield f"begins with {word!r} instead of a noun"
    elif word[:1].islower() and word.rstrip("~") not in NOTATION:
        yield "begins with a small letter"
    elif not text.endswith((".", ".)", ":", "?", "!")):
        yield "does not end with a full stop"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


if __name__ == "__main__":
    listed = offences_under([Path(name) for name in sys.argv[1:]] or [SOURCE])
    sys.stdout.writelines(f"{line}\n" for line in listed)
    sys.exit(1 if listed else 0)
