import pytest

from torchcram import NM, Chain, GlobalTopK, Quantize, RowTopK, UniformTopK
from torchcram.pruners import Obs, SparseGPT, Wanda, parse_pruner

READ = {
    "obs@uniform:0.7": Obs(UniformTopK(0.7)),
    "obs@global:0.9": Obs(GlobalTopK(0.9)),
    "obs@nm:2:4": Obs(NM(2, 4)),
    "obs:r8@uniform:0.7": Obs(UniformTopK(0.7), recomputations=8),
    "obs:m256:b25:d1e-05:r2@nm:2:4": Obs(
        NM(2, 4), gradients=256, block=25, damping=1e-5, recomputations=2
    ),
    "obs:d1e20@nm:2:4": Obs(NM(2, 4), damping=1e20),
    "sparsegpt:b64:d0.1@row:0.5+int8": Chain(
        SparseGPT(RowTopK(0.5), damping=0.1, block=64), Quantize(8)
    ),
    "wanda@row:0.5": Wanda(RowTopK(0.5)),
    "wanda@nm:2:4": Wanda(NM(2, 4)),
    "sparsegpt@uniform:0.5": SparseGPT(UniformTopK(0.5)),
    "sparsegpt@nm:2:4+int4:g64": Chain(SparseGPT(NM(2, 4)), Quantize(4, 64)),
    "row:0.5": RowTopK(0.5),
    "row:0.1-0.5": RowTopK((0.1, 0.5)),
    "global:0.5+int8": Chain(GlobalTopK(0.5), Quantize(8)),
}


@pytest.mark.parametrize("text", READ)
def test_text_and_operator_are_inverse(text):
    assert parse_pruner(text) == READ[text]
    assert str(READ[text]) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "obt@uniform:0.7",
            "no pruner 'obt' (did you mean obs?); allowed: obs@..., wanda@..., sparsegpt@...",
        ),
        ("@uniform:0.7", "no pruner ''"),
        ("obs@", "cannot read ''; allowed: global:0.9"),
        ("obs", "cannot read 'obs'"),
        ("obs@int8", "'int8' is no pattern of zeros"),
        ("obs@wanda@uniform:0.5", "cannot read 'wanda@uniform:0.5'"),
        ("obs@uniform:1.5", "UniformTopK: sparsity must be in [0, 1), got 1.5"),
        ("obs@uniform:0.3-0.9", "uniform:0.3-0.9 is a range"),
        ("wanda@row", "cannot read 'row'; allowed: global:0.9, uniform:0.8, row:0.5"),
        ("wanda@row:x", "cannot read 'row:x'; allowed: global:0.9, uniform:0.8, row:0.5"),
        (
            "sparsegpt@global:0.5",
            "global:0.5 is impossible, as layers are pruned one after another",
        ),
        ("obs@uniform:0.7+", "cannot read ''"),
        ("OBS@uniform:0.7", "no pruner 'OBS'"),
        ("obs:r@uniform:0.7", "cannot read the option 'r'; allowed are each once"),
        ("obs:r2:r3@uniform:0.7", "cannot read the option 'r3'"),
        ("obs:r1.5@uniform:0.7", "cannot read the option 'r1.5'"),
        ("obs:r0@uniform:0.7", "recomputations is 0, allowed are integers from 1"),
        ("obs:r1001@uniform:0.7", "recomputations is 1001, allowed are integers from 1 to 1000"),
        (f"obs:r{10**19}@nm:2:4", f"recomputations is {10**19}, allowed are integers from 1 to"),
        ("obs:x1@uniform:0.7", "m (gradients), b (block), d (damping), r (recomputations)"),
        ("sparsegpt:m4@uniform:0.7", "cannot read the option 'm4'"),
        ("wanda:d1@uniform:0.7", "cannot read the option 'd1'; allowed are none"),
        ("obs:@uniform:0.7", "cannot read the option ''"),
    ],
)
def test_errors_name_the_text_and_what_is_allowed(text, message):
    with pytest.raises(ValueError, match="operator ") as raised:
        parse_pruner(text)
    assert f"operator {text!r}: " in str(raised.value)
    assert message in str(raised.value)
