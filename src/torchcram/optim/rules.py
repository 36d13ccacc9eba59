"""The update rules, as data.

    rule        w~                                              g~
    SAM         w + rho g/|g|                                   grad L(w~)
    CrAM        C(w + rho g)                                    M * grad L(w~)
    CrAM+       C(w + rho g)                                    M * grad L(w~) + g
    C-SAM       C(w + rho h/|h|), h = M_w * grad L(C(w))        M * grad L(w~)
    Top-K       C(w)                                            grad L(w~)
    Top-K+      C(w)                                            M * grad L(w~) + g

A rule is the passes that follow the dense one. Each takes the gradient that the pass before it
left, computes a perturbed point and leaves a new gradient; the last one leaves g~.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """One forward-backward pass at a perturbed point.

    Attributes:
        ascend: step along the gradient: w + rho g rather than w.
        compress: send the compressible weights through C.
        mask: multiply the gradient found there by the mask M of C.
        plus: add to it the gradient that was there before.
    """

    ascend: bool = False
    compress: bool = False
    mask: bool = False
    plus: bool = False


@dataclass(frozen=True)
class UpdateRule:
    """How g~ comes about.

    Attributes:
        name: as in the paper.
        passes: what follows the dense pass at w.
        normalize: whether the ascent is along g/|g| unless the optimizer is told otherwise.
    """

    name: str
    passes: tuple[Pass, ...]
    normalize: bool = False

    @property
    def compresses(self) -> bool:
        """Whether the rule makes use of operators."""
        return any(one.compress for one in self.passes)


_C_OF_W = Pass(compress=True, mask=True)
_C_OF_ASCENT = Pass(ascend=True, compress=True, mask=True)

SAM = UpdateRule("SAM", (Pass(ascend=True),), normalize=True)
CRAM = UpdateRule("CrAM", (_C_OF_ASCENT,))
CRAM_PLUS = UpdateRule("CrAM+", (Pass(ascend=True, compress=True, mask=True, plus=True),))
C_SAM = UpdateRule("C-SAM", (_C_OF_W, _C_OF_ASCENT), normalize=True)
TOPK = UpdateRule("Top-K", (Pass(compress=True),))
TOPK_PLUS = UpdateRule("Top-K+", (Pass(compress=True, mask=True, plus=True),))

RULES = {rule.name: rule for rule in (SAM, CRAM, CRAM_PLUS, C_SAM, TOPK, TOPK_PLUS)}
