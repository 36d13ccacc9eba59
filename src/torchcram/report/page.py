"""The result of the demonstration as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
from dataclasses import fields
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from torchcram.report.table import NOTICEABLE, percent, points

if TYPE_CHECKING:
    from torchcram.experiments.demo_result import DemoResult


def demo_page(result: DemoResult, picture: bytes) -> str:
    """Renders the page.

    Args:
        result: of `run_demo`.
        picture: a PNG, which becomes part of the page.
    """
    environment = Environment(
        loader=PackageLoader("torchcram.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(percent=percent, points=points)
    plain, aware = result.trained
    return environment.get_template("page.html.j2").render(
        result=result,
        plain=plain,
        aware=aware,
        widest=max(result.settings.targets, key=lambda target: _gap(result, target)),
        noticeable=NOTICEABLE,
        picture=base64.b64encode(picture).decode(),
        settings=[
            (field.name, _text(getattr(result.settings, field.name)))
            for field in fields(result.settings)
        ],
    )


def _gap(result: DemoResult, target: str) -> float:
    one, other = (result.row(trained.method, target).after for trained in result.trained)
    return abs(one - other)


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
