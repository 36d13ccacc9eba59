"""Report files, written so that none of them is ever there by half."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

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
    """
    folder.mkdir(parents=True, exist_ok=True)
    aside = {name: folder / f".{name}.{os.getpid()}.tmp" for name in contents}
    try:
        for name, content in contents.items():
            aside[name].write_bytes(content)
        for name, path in aside.items():
            path.replace(folder / name)
    finally:
        for path in aside.values():
            path.unlink(missing_ok=True)
