"""Pages out of templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined


def render(
    template: str, values: Mapping[str, object], *, filters: Mapping[str, Callable[..., str]]
) -> str:
    """Fills a template of this package; all values are escaped, a missing one is an error.

    Args:
        template: name of the file.
        values: by the names that the template has them by.
        filters: likewise.
    """
    environment = Environment(
        loader=PackageLoader("torchcram.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(filters)
    return environment.get_template(template).render(values)
