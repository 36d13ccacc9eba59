"""Digests of what the recipes of the package resolve to.

`python tests/recipe_digests.py` writes them anew; run it after changing a recipe on purpose.
"""

import hashlib
import json
from pathlib import Path

from torchcram.experiments.recipe import load_recipe, recipe_names

FILE = Path(__file__).with_suffix(".json")


def digests():
    """Returns a digest of all keys and values of every recipe, by name."""
    return {name: _digest(load_recipe(name).to_dict()) for name in recipe_names()}


def _digest(settings):
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    FILE.write_text(json.dumps(digests(), indent=2) + "\n")
