"""Workflows run make targets only; workflows, package and citation agree about versions."""

import re
from pathlib import Path

import pytest
import yaml

from torchcram import __version__

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def jobs(path):
    return yaml.safe_load(path.read_text())["jobs"].values()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_is_a_make_target(path):
    commands = [step["run"] for job in jobs(path) for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        program, target, *_ = command.split()
        assert program == "make"
        assert target in TARGETS, command


def test_the_matrix_has_the_supported_versions():
    project = (ROOT / "pyproject.toml").read_text()
    (matrix,) = [
        job["strategy"]["matrix"]
        for job in jobs(ROOT / ".github" / "workflows" / "tests.yml")
        if "strategy" in job
    ]
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project) == matrix["python"]
    assert f'requires-python = ">={matrix["python"][0]}"' in project
    assert f'"torch>={matrix["torch"][0].removesuffix(".*")}"' in project


def test_the_citation_names_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()
