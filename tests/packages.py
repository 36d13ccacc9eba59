"""Throw-away packages, installed by nothing but a folder on sys.path."""

import sys

BLOCKS = '''
from dataclasses import dataclass
from typing import ClassVar

from torchcram import Sparsifier, register_operator
from torchcram.pruners import Pruner, register_pruner
from torchcram.selection import count_kept, keep_largest
from torchcram.weights import apply_masks_

print("blocks were imported")


@register_operator("blocks")
@dataclass(frozen=True)
class Blocks(Sparsifier):
    """Keeps the rows of the largest norms."""

    sparsity: float

    def __post_init__(self):
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"Blocks: sparsity {self.sparsity!r} is not in [0, 1)")

    @classmethod
    def from_text(cls, text):
        return cls(float(text))

    def select(self, scores):
        masks = {}
        for name, score in scores.items():
            norms = score.flatten(1).norm(dim=1)
            (keep,) = keep_largest([norms], count_kept(len(norms), self.sparsity))
            masks[name] = keep.view(-1, *[1] * (score.dim() - 1)).expand_as(score).contiguous()
        return masks

    def __str__(self):
        return f"blocks:{self.sparsity}"


@register_pruner("blocks-obs")
@dataclass(frozen=True)
class BlocksObs(Pruner):
    """Looks at the batches and then keeps the largest weights."""

    letters: ClassVar = {"m": "gradients", "d": "damping"}
    gradients: int = 4
    damping: float = 1e-3

    def prune_(self, weights, calibration):
        calibration.run()
        masks = self.pattern.select(weights)
        apply_masks_(weights, masks)
        return masks
'''


def install(folder, monkeypatch, *, entry_points, name="blocks-package", **modules):
    """Writes modules and the metadata of a package into `folder`, which joins sys.path."""
    metadata = folder / f"{name.replace('-', '_')}-1.5.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    for module, code in modules.items():
        (folder / f"{module}.py").write_text(code)
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(folder)


def install_blocks(folder, monkeypatch):
    """Installs a package with an operator and a pruner."""
    install(
        folder,
        monkeypatch,
        entry_points=(
            "[torchcram.operators]\nblocks = blocks_module:Blocks\n"
            "[torchcram.pruners]\nblocks-obs = blocks_module:BlocksObs\n"
        ),
        blocks_module=BLOCKS,
    )
