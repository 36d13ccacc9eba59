"""Tables of results in Markdown files, to be written again from the results.

A table stands between the lines `<!-- results:cifar10/resnet20 sgd sam -->` and
`<!-- end results -->`; see `markdown_table` for what the name says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchcram.experiments.evaluation.results import Result, read_results
from torchcram.experiments.io.files import write_atomically
from torchcram.report.results_table import markdown_table

END = "<!-- end results -->"
_MARKER = re.compile(
    r"^<!-- (?:results:(?P<name>\S(?:.*\S)?)|(?P<end>end results)) -->[ \t]*\r?$", re.MULTILINE
)


def update_marked(text: str, name: str, table: str) -> str:
    """Puts a table between `<!-- results:NAME -->` and `<!-- end results -->`.

    Args:
        text: of a Markdown file. The markers stand on lines of their own.
        name: of the place; wherever it stands more than once, all are replaced.
        table: with or without an end of line; it may not contain a marker.

    Raises:
        ValueError: where the name is not marked, or a marker has no other end.
    """
    if _MARKER.search(table):
        raise ValueError(f"the table for {name!r} contains a marker of its own")
    if name not in marked(text):
        raise ValueError(f"no place is marked '<!-- results:{name} -->'; marked: {marked(text)}")
    parts, done = [], 0
    for begin, end in _places(text):
        if begin["name"] == name:
            parts += [text[done : begin.end()], "\n", table.strip("\n"), "\n"]
            done = end.start()
    return "".join(parts) + text[done:]


def marked(text: str) -> list[str]:
    """Returns the names of the marked places of a Markdown file, in their order, each once."""
    return list(dict.fromkeys(begin["name"] for begin, _ in _places(text)))


def stale(files: Iterable[str | Path], results_dir: str | Path) -> list[str]:
    """Returns the marked places, as "file: name", whose tables are not those of the results."""
    results = read_results(results_dir)
    return [
        f"{path}: {name}"
        for path in map(Path, files)
        for text in [_read(path)]
        for name in marked(text)
        if _update(text, [name], results) != text
    ]


def update_files(files: Iterable[str | Path], results_dir: str | Path) -> list[Path]:
    """Writes all marked tables again; returns the files that changed. After an error none has."""
    results, changed = read_results(results_dir), {}
    for path in map(Path, files):
        text = _read(path)
        new = _update(text, marked(text), results)
        if new != text:
            changed[path] = new
    for path, new in changed.items():
        write_atomically(path, new.encode())
    return list(changed)


def _read(path: Path) -> str:
    try:
        text = path.read_bytes().decode()  # as it is, ends of lines included
        _places(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return text


def _update(text: str, names: Iterable[str], results: Sequence[Result]) -> str:
    for name in names:
        text = update_marked(text, name, markdown_table(results, name))
    return text


def _places(text: str) -> list[tuple[re.Match[str], re.Match[str]]]:
    """Pairs the markers; refuses one without the other."""
    markers = list(_MARKER.finditer(text))
    for place, marker in enumerate(markers):
        line = text.count("\n", 0, marker.start()) + 1
        if (marker["end"] is None) != (place % 2 == 0):
            raise ValueError(f"line {line}: '{marker[0].strip()}' stands in the wrong order")
    if len(markers) % 2:
        raise ValueError(f"'{markers[-1][0].strip()}' is not followed by '{END}'")
    return list(zip(markers[::2], markers[1::2], strict=True))
