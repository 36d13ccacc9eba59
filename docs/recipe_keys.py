"""Writes the table of docs/recipe-keys.md, all keys of a recipe, from the schema."""

from __future__ import annotations

from pathlib import Path

import figures

from torchcram.experiments.recipe.keys import recipe_keys

PAGE = figures.DOCS / "recipe-keys.md"
SECTION = ("keys", "recipe")


def table() -> str:
    """Returns the table in Markdown."""
    rows = [f"| `{key.name}` | {key.default} | {_escaped(key.meaning)} |" for key in recipe_keys()]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def _escaped(text: str) -> str:
    return text.replace("|", "&#124;").replace("<", "&lt;")


def main(page: Path = PAGE) -> None:
    """Updates the page."""
    text, known = figures.update_section(page.read_text("utf-8"), *SECTION, table())
    if not known:
        raise SystemExit(f"{page} has no section {SECTION[0]}:{SECTION[1]}")
    page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
