"""The API reference has every public name, and code that uses it and runs with the tests."""

import ast
import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {page.name: page.read_text() for page in sorted(DOCS.glob("api-*.md"))}
DIRECTIVE = re.compile(r"^\.\. (?:auto|py:)\w+:: (\S+)", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOCUMENTED = [(name, page) for page, text in PAGES.items() for name in DIRECTIVE.findall(text)]
MODULES = [
    "torchcram",
    "torchcram.artifact",
    "torchcram.runtime",
    "torchcram.pruners",
    "torchcram.baselines",
    "torchcram.integrations.lightning",
    "torchcram.integrations.transformers",
    "torchcram.integrations.compressed_tensors",
    "torchcram.integrations.peft",
]


def used_names(text):
    """Returns the names that the code of a page uses; importing one is not using it."""
    nodes = [node for block in BLOCK.findall(text) for node in ast.walk(ast.parse(block))]
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented_once(module):
    public = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    public.discard("torchcram.__version__")
    assert public == {name for name, _ in DOCUMENTED if name.rpartition(".")[0] == module}


def test_no_name_is_documented_twice():
    names = [name for name, _ in DOCUMENTED]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("page", PAGES)
def test_every_name_is_used_by_code_of_its_page(page):
    # test_docs.py runs the code
    names = {name.rpartition(".")[2] for name, its_page in DOCUMENTED if its_page == page}
    assert names
    assert names <= used_names(PAGES[page])
