"""Update rules as data.

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
        ascend: Whether to move along the gradient first: w + rho g rather than w.
        compress: Whether to compress the compressible weights with C.
        mask: Whether to multiply the gradient computed there by the mask M of C.
        plus: Whether to add the gradient of the pass before.
    """

    ascend: bool = False
    compress: bool = False
    mask: bool = False
    plus: bool = False


@dataclass(frozen=True)
class UpdateRule:
    """Rule by which g~ is computed.

    Attributes:
        name: Name of the rule in the paper.
        passes: Passes that follow the dense pass at w.
        normalize: Whether the ascent is along g/|g|, unless the optimizer overrides it.
        rho: Factor of the ascent, unless the optimizer overrides it; 0 takes none.
    """

    name: str
    passes: tuple[Pass, ...]
    normalize: bool = False
    rho: float = 0.0

    @property
    def compresses(self) -> bool:
        """Whether the rule uses operators."""
        return any(pass_.compress for pass_ in self.passes)


_C_OF_W = Pass(compress=True, mask=True)
_C_OF_ASCENT = Pass(ascend=True, compress=True, mask=True)

SAM = UpdateRule("SAM", (Pass(ascend=True),), normalize=True, rho=0.05)
CRAM = UpdateRule("CrAM", (_C_OF_ASCENT,))
CRAM_PLUS = UpdateRule("CrAM+", (Pass(ascend=True, compress=True, mask=True, plus=True),))
C_SAM = UpdateRule("C-SAM", (_C_OF_W, _C_OF_ASCENT), normalize=True, rho=0.05)
TOPK = UpdateRule("Top-K", (Pass(compress=True),))
TOPK_PLUS = UpdateRule("Top-K+", (Pass(compress=True, mask=True, plus=True),))

RULES = {rule.name: rule for rule in (SAM, CRAM, CRAM_PLUS, C_SAM, TOPK, TOPK_PLUS)}
