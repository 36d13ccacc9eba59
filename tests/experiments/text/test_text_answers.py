"""The example that answers questions from a compact file."""

import re
from pathlib import Path

import pytest
import torch
from commands import run_example, succeed

from torchcram import artifact, sparsity
from torchcram.experiments.recipe.build import target_weights
from torchcram.experiments.training.trainer import load_trained

pytestmark = pytest.mark.usefixtures("_here")
SETS = ["text.length=48", "text.stride=16", "train.batch_size=8", "compress.to=[uniform:0.5]"]
PARAGRAPH = "The castle of king 7 was built in 1807 by the old river. " * 4  # several windows


def test_questions_are_answered_out_of_the_paragraph(tiny, questions, tmp_path):
    words = ["train", "squad/minilm-l6/cram-plus-multi", "--data", questions, "--epochs", 1]
    for one in (f"model.name={tiny}", *SETS):
        words += ["--set", one]
    succeed(*words, "--out", "run")
    Path("paragraph.txt").write_text(PARAGRAPH)
    asked = "When was the castle built?\nWho is old?\n"
    words = ("run", "paragraph.txt")
    printed = run_example(
        "serve_answers", *words, cwd=tmp_path, launch=["-W", "error"], input=asked
    )
    *_, first, second = printed.splitlines()
    for line in (first, second):
        answer = re.fullmatch(r"'(.+)' in \d+ ms", line)
        assert answer, printed
        assert answer[1] in PARAGRAPH
    sizes = re.findall(r"^(\S+): \d\.\d\d MB, (\d\.\d) times smaller$", printed, re.MULTILINE)
    assert [target for target, _ in sizes] == ["uniform:0.8+int8", "uniform:0.8", "uniform:0.9"]
    trained = load_trained(Path("run"), torch.device("cpu"))
    artifact.load("run/uniform-0.9.torchcram.safetensors", trained.model)
    found = sparsity(target_weights(trained.recipe, trained.model))
    assert found == pytest.approx(0.9, abs=0.01)
