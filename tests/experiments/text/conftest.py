import os
import sys

import pytest
from runs import one_thread
from tiny_language import causal_folder, text_folder
from tiny_texts import model_folder, squad_folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a small BERT."""
    return model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def questions(tmp_path_factory):
    """A folder with twenty questions to train on and six to test on."""
    return squad_folder(tmp_path_factory.mktemp("questions"))


@pytest.fixture
def _here(tmp_path, monkeypatch):
    """A folder of its own, which default paths are in, for child processes too."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path)))
    monkeypatch.chdir(tmp_path)
    with one_thread():
        yield


@pytest.fixture(scope="session")
def decoder(tmp_path_factory):
    """The folder of a small Llama whose embeddings are its head."""
    return causal_folder(tmp_path_factory.mktemp("models") / "decoder", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def paragraphs(tmp_path_factory):
    """A folder with a few paragraphs of running text."""
    return text_folder(tmp_path_factory.mktemp("paragraphs"))
