"""`import torchcram` is cheap, and imports point one way."""

import json
import subprocess
import sys

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
