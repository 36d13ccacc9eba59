import os
import shutil
import sys

import pytest
from commands import SGD, succeed
from runs import one_thread


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """A folder of its own, which default paths are in, for child processes too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path)))
    monkeypatch.chdir(tmp_path)
    with one_thread():
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "seed0"
    with one_thread():
        targets = "compress.to=[global:0.5, global:0.9]"
        succeed("train", SGD, "--epochs", 3, "--set", targets, "--out", folder)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A finished run, a copy for every test."""
    return shutil.copytree(finished, tmp_path / "seed0")
