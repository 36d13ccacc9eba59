"""Report files, written so that none of them is ever there by half."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram.experiments.io.files import name_file_in_errors
from torchcram.files import written_aside
from torchcram.report.page import demo_page
from torchcram.report.picture import demo_picture

if TYPE_CHECKING:
    from torchcram.experiments.demo_result import DemoResult

PICTURE, PAGE, JSON = "picture.png", "page.html", "result.json"


def write_demo(result: DemoResult, folder: Path) -> dict[str, Path]:
    """Writes the picture, the page and the result as JSON; returns their paths by what they are.

    Args:
        result: of `run_demo`.
        folder: made if it is not there; files of an earlier run are replaced.
    """
    picture = demo_picture(result)
    contents = {
        PICTURE: picture,
        PAGE: demo_page(result, picture).encode(),
        JSON: (json.dumps(asdict(result), indent=2) + "\n").encode(),
    }
    write_files(folder, contents)
    return {"picture": folder / PICTURE, "page": folder / PAGE, "result": folder / JSON}


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes all files aside, then moves them into place; after an error all are as before.

    Only the moves themselves, which need no space on the disk, come one after another.

    Args:
        folder: Folder the files are written to; made if it is not there.
        contents: Contents of the files by name.
    """
    with ExitStack() as written:
        for name, content in contents.items():
            path = folder / name
            written.enter_context(name_file_in_errors(path))
            written.enter_context(written_aside(path)).write_bytes(content)
