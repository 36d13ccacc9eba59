"""The result of the demonstration as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
from dataclasses import fields
from typing import TYPE_CHECKING

from torchcram.report.table import NOTICEABLE, deployed_cells, percent, points
from torchcram.report.runs import render

if TYPE_CHECKING:
    from torchcram.experiments.demo_result import DemoResult


def demo_page(result: DemoResult, picture: bytes) -> str:
    """Renders the page.

    Args:
        result: of `run_demo`.
        picture: a PNG, which becomes part of the page.
    """
    plain, aware = result.trained
    values = {
        "result": result,
        "plain": plain,
        "aware": aware,
        "widest": max(result.settings.targets, key=lambda target: _gap(result, target)),
        "noticeable": NOTICEABLE,
        "deployed": [[one.operator, *deployed_cells(result, one)] for one in result.deployed],
        "picture": base64.b64encode(picture).decode(),
        "settings": [
            (field.name, _text(getattr(result.settings, field.name)))
            for field in fields(result.settings)
        ],
    }
    return render("page.html.j2", values, filters={"percent": percent, "points": points})


def _gap(result: DemoResult, target: str) -> float:
    one, other = (result.row(trained.method, target).after for trained in result.trained)
    return abs(one - other)


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
