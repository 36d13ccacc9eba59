"""Recipes as YAML text, alone and in families, with overrides."""

import json
from pathlib import Path

import torchcram
from fuzz.mutations import change_bytes, change_text
from torchcram.experiments.io import yaml_text
from torchcram.experiments.recipe import Recipe, load_recipe

FAMILIES = {
    "digits/convnet-digits": ("sgd", "cram-plus-multi"),
    "squad/minilm-l6": ("adam", "cram-plus-multi-long", "squad/bert-base-uncased/adam"),
    "cifar10/resnet20": ("cram-plus-multi-finetune", "cifar10-jpeg/resnet20/sgd"),
    "flowers102/resnet50": ("transfer", "dtd/resnet50/transfer"),
}
RECIPES = Path(torchcram.__file__).parent / "recipes"
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
        "base",
        "methods",
        "variants",
        "from",
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
    *(
        "early_stopping",
        "distillation",
        "ema",
        "freeze",
        "calibration_samples",
        "watch",
        "[a]",
        "{a: b}",
    ),
)
WORDS = (*VALUES, *KEYS, "\n", "\n\n", ": ", "- ", "  ", "#", "---\n", "...\n", "\t", "%YAML 9.9\n")


def make(rng):
    text, name = _text(rng)
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
    return json.dumps([name, overrides]).encode() + b"\n" + content


def _text(rng):
    """Returns the text of a file, and which recipe of a family is to be read; None for a single."""
    family = rng.choice(list(FAMILIES))
    name = rng.choice(FAMILIES[family])
    full_name = name if "/" in name else f"{family}/{name}"
    way = rng.randrange(4)
    if way == 0:
        return f"extends: {full_name}\ntitle: Mine\ntrain:\n  epochs: 30\n", None
    if way == 1:
        return yaml_text.dump(load_recipe(full_name).to_dict()), None
    text = (RECIPES / f"{family}.yaml").read_text("utf-8")
    if rng.random() < 0.1:
        name = rng.choice((None, "", "a", "a/b/c", "/", f"{name}/"))
    return text, name


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
    header, _, text = content.partition(b"\n")
    name, overrides = json.loads(header)
    path = folder / "recipe.yaml"
    path.write_bytes(text)
    try:
        recipe = load_recipe(path if name is None else f"{path}:{name}", overrides)
    except FileNotFoundError:  # of what it extends
        assert b"extends" in content
        return False
    except ValueError:
        return False
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    path.write_text(yaml_text.dump(recipe.to_dict()), "utf-8")
    assert load_recipe(path) == recipe
    return True
