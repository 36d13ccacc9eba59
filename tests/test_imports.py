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
    extra = imported("from torchcram import *") - imported("import torch")
    ours = {name for name in extra if name.split(".")[0] == "torchcram"}
    assert not {name for name in extra if name in HEAVY}
    others = {name for name in extra - ours if not name.startswith("torch.")}
    assert len(others) <= 3, others


def test_every_public_name_is_there_and_documented():
    for name in torchcram.__all__:
        assert hasattr(torchcram, name)
        if callable(getattr(torchcram, name)) and name not in ("Weights", "Masks"):
            assert getattr(torchcram, name).__doc__


SINGLE = """
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


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_every_module_of_the_experiments_can_be_imported_first():
    source = Path(torchcram.__file__).parent
    paths = sorted((source / "experiments").rglob("*.py"))
    assert len(paths) > 50
    names = [
        ".".join(("torchcram", *path.relative_to(source).with_suffix("").parts)) for path in paths
    ]
    command = [sys.executable, "-W", "ignore", "-c", SINGLE, *names]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not out.stdout, out.stderr[-2000:]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["compress"], 2),
    ],
)
def test_the_command_line_answers_without_torch(arguments, code):
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['torchcram', *{arguments!r}]\n"
        "try:\n"
        "    runpy.run_module('torchcram', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    code = end.code\n"
        "print('torch' in sys.modules, code)\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout.splitlines()[-1] == f"False {code}", out.stderr


ORDERS = [
    "import torchcram",
    "import torchcram.compress",  # the module, whose name a function has too
    "import torchcram.optim, torchcram.compress",
    "from torchcram.compress import compress_",
    "from torchcram import *",
]
CHECKS = """
import torchcram, torchcram.weights
from torchcram import compress, CrAM
assert compress is torchcram.compress and callable(compress)
assert CrAM is torchcram.optim.CrAM
assert set(torchcram.__all__) <= set(dir(torchcram))
assert not hasattr(torchcram, "nothing")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_public_names_are_the_same_whatever_is_imported_first():
    program = SINGLE.replace("importlib.import_module(name)", "exec(name)")
    command = [sys.executable, "-c", program, *(f"{order}\n{CHECKS}" for order in ORDERS)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not out.stdout, out.stderr[-2000:]


def test_no_modules_import_each_other_in_a_circle():
    """Also not under TYPE_CHECKING, where a circle would be hidden."""
    graph = pytest.importorskip("grimp").build_graph("torchcram")
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while leaves := {module for module, imported in left.items() if not imported & left.keys()}:
        left = {module: imported for module, imported in left.items() if module not in leaves}
    assert sorted(left) == []
