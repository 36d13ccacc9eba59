"""The API reference has every public name."""

import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
DOCUMENTED = re.findall(
    r"^\.\. (?:auto|py:)\w+:: (\S+)",
    "\n".join(page.read_text() for page in sorted(DOCS.glob("api-*.md"))),
    re.MULTILINE,
)
MODULES = [
    "torchcram",
    "torchcram.artifact",
    "torchcram.runtime",
    "torchcram.pruners",
    "torchcram.integrations.lightning",
    "torchcram.integrations.transformers",
    "torchcram.integrations.peft",
]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented_once(module):
    public = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    public.discard("torchcram.__version__")
    assert public == {name for name in DOCUMENTED if name.rpartition(".")[0] == module}


def test_no_name_is_documented_twice():
    assert len(DOCUMENTED) == len(set(DOCUMENTED))
