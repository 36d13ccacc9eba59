"""The list of mutants fits the sources, so that `make mutants` can be run at any time."""

import pytest
from mutants import MUTANTS, ROOT, SOURCES


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.before.strip()}"
)
def test_a_mutant_can_be_applied(mutant):
    text = (SOURCES / "torchcram" / mutant.file).read_text()
    compile(mutant.apply(text), mutant.file, "exec")
    assert all((ROOT / test.split("::")[0]).exists() for test in mutant.tests)
