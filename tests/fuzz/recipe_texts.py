"""Recipes as YAML text, with overrides."""

import json

from fuzz.mutations import change_bytes, change_text
from torchcram.experiments.io import yaml_text
from torchcram.experiments.recipe import Recipe, load_recipe
from torchcram.experiments.recipe.loading import _packaged

NAMES = (
    "digits/convnet-digits/sgd",
    "digits/convnet-digits/cram-plus-multi",
    "squad/minilm-l6/adam",
    "squad/minilm-l6/cram-plus-multi",
    "cifar10/resnet20/cram-plus-multi-finetune",
    "flowers102/resnet50/transfer",
)
VALUES = (
    *("0", "1", "-1", "0.5", "1e-3", "1e999", ".inf", ".nan", "9" * 30, "0x10", "1_000", "1:30:00"),
    *("null", "~", "true", "yes", "''", '"x"', "text", "[]", "{}", "[1, [2]]", "{a: 1}", "[{}]"),
    *("!!bool maybe", "!!timestamp x", "2001-01-01", "!!int x", "!!float x", "!!null x", "!x y"),
    *("!!binary x", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!python/tuple [1]"),
    *("!!str {a: 1}", "!!seq {a: 1}", "!!map [a]", "!!int [1]", "!!float {}", "!!timestamp []"),
    *("global:0.9", "nm:2:4", "int4", "obs:m64@global:0.9", "global:0.1-0.9", "int99", "(", "[a-"),
    *(
        "digits",
        "convnet-digits",
        "sgd",
        "fp32",
        "crop-flip",
        "|\n  text",
        ">\n  text",
        "&a 1",
        "*a",
    ),
)
KEYS = (
    *(
        "name",
        "title",
        "data",
        "model",
        "train",
        "optimizer",
        "schedule",
        "compress",
        "cram",
        "text",
    ),
    *(
        "extends",
        "epochs",
        "to",
        "rho",
        "lr",
        "only",
        "skip",
        "operators",
        "<<",
        "=",
        "? a",
        "1",
        "~",
    ),
    *("early_stopping", "distillation", "freeze", "calibration_samples", "watch", "[a]", "{a: b}"),
)
WORDS = (*VALUES, *KEYS, "\n", "\n\n", ": ", "- ", "  ", "#", "---\n", "...\n", "\t", "%YAML 9.9\n")


def make(rng):
    text = _packaged().joinpath(f"{rng.choice(NAMES)}.yaml").read_text("utf-8")
    if rng.random() < 0.5:  # without what it extends
        lines = [line for line in text.splitlines() if not line.startswith("extends")]
        text = "\n".join(lines)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        text = _change_line(rng, text)
    if rng.random() < 0.2:
        text = change_text(rng, text, WORDS)
    if rng.random() < 0.02:
        text += "deep: " + "[" * rng.choice((50, 5000)) + "\n"
    content = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        content = change_bytes(rng, content)
    overrides = [_override(rng) for _ in range(rng.choice((0, 0, 1, 2)))]
    return json.dumps(overrides).encode() + b"\n" + content


def _change_line(rng, text):
    lines = text.splitlines()
    at = rng.randrange(len(lines) or 1)
    line = lines[at] if lines else ""
    key, colon, _ = line.partition(":")
    way = rng.randrange(6)
    if way == 0:
        lines[at : at + 1] = []
    elif way == 1:
        lines.insert(at, rng.choice(lines or [""]))
    elif way == 2:
        lines[at : at + 1] = [line[: len(line) - len(line.lstrip())] + rng.choice(KEYS) + ": 1"]
    elif way == 3:
        lines[at : at + 1] = [rng.choice(("  ", " ", "", "\t")) + line.strip()]
    else:
        lines[at : at + 1] = [f"{key}{colon or ':'} {rng.choice(VALUES)}"]
    return "\n".join(lines) + "\n"


def _override(rng):
    path = ".".join(rng.choice(KEYS) for _ in range(rng.choice((1, 2, 2, 3))))
    return f"{path}{rng.choice(('=', '=', '=', ''))}{rng.choice(VALUES)}"


def read(content, folder):
    overrides, _, text = content.partition(b"\n")
    path = folder / "recipe.yaml"
    path.write_bytes(text)
    try:
        recipe = load_recipe(path, json.loads(overrides))
    except FileNotFoundError:  # of what it extends
        assert b"extends" in content
        return False
    except ValueError:
        return False
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    path.write_text(yaml_text.dump(recipe.to_dict()), "utf-8")
    assert load_recipe(path) == recipe
    return True
