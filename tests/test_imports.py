"""`import torchcram` is cheap, and imports point one way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import torchcram

HEAVY = ["torchvision", "transformers", "lightning", "onnx", "plotly", "matplotlib", "sklearn"]
HEAVY += ["triton", "rich", "typer", "jinja2", "numpy.testing"]


def imported(statement):
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(out.stdout))


def test_nothing_heavy_comes_along():
    extra = imported("import torch, torchcram") - imported("import torch")
    ours = {name for name in extra if name.split(".")[0] == "torchcram"}
    assert not {name for name in extra if name in HEAVY}
    others = {name for name in extra - ours if not name.startswith("torch.")}
    assert len(others) <= 3, others


def test_every_public_name_is_there_and_documented():
    for name in torchcram.__all__:
        assert hasattr(torchcram, name)
        if callable(getattr(torchcram, name)) and name not in ("Weights", "Masks"):
            assert getattr(torchcram, name).__doc__


ALONE = """
import importlib, os, sys, traceback
import torch, transformers, rich, typer
for name in sys.argv[1:]:
    child = os.fork()  # torch is not imported again for each
    if not child:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_module_of_the_experiments_can_be_imported_first():
    source = Path(torchcram.__file__).parent
    paths = sorted((source / "experiments").rglob("*.py"))
    assert len(paths) > 50
    names = [
        ".".join(("torchcram", *path.relative_to(source).with_suffix("").parts)) for path in paths
    ]
    command = [sys.executable, "-W", "ignore", "-c", ALONE, *names]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not out.stdout, out.stderr[-2000:]
