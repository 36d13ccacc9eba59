import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import ConvNet

from torchcram import GlobalTopK, UniformTopK, compressible_weights, sparsity

LEVELS = [0.0, 0.1, 0.5, 0.75, 0.9, 0.95, 0.999]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_the_achieved_sparsity_is_the_requested_one(level, dtype):
    for operator in (GlobalTopK(level), UniformTopK(level)):
        weights = compressible_weights(ConvNet().to(dtype))
        groups = [[*weights]] if isinstance(operator, GlobalTopK) else [[name] for name in weights]
        masks = operator.compress_(weights)
        for names in groups:
            total = sum(weights[name].numel() for name in names)
            kept = sum(int(weights[name].count_nonzero()) for name in names)
            assert kept == total - round(level * total)
            assert kept == sum(int(masks[name].sum()) for name in names)


def test_what_is_kept_is_untouched_and_the_rest_zero():
    weights = compressible_weights(ConvNet())
    before = {name: w.detach().clone() for name, w in weights.items()}
    masks = GlobalTopK(0.6).compress_(weights)
    for name, weight in weights.items():
        assert torch.equal(weight, before[name].masked_fill(~masks[name], 0))
    smallest = min(float(before[n][m].abs().min()) for n, m in masks.items() if m.any())
    largest = max(float(before[n][~m].abs().max()) for n, m in masks.items() if not m.all())
    assert largest <= smallest


def test_select_follows_the_scores_not_the_weights():
    scores = {"a": torch.tensor([[1.0, 9.0]]), "b": torch.tensor([[-8.0, 2.0]])}
    masks = GlobalTopK(0.5).select(scores)
    assert masks["a"].tolist() == [[False, True]]
    assert masks["b"].tolist() == [[True, False]]


@pytest.mark.parametrize("kind", [GlobalTopK, UniformTopK])
@pytest.mark.parametrize("bad", [-0.1, 1.0, 1.5, float("nan"), "0.5", True, (0.9, 0.3), (0.5, 1.0)])
def test_bad_sparsity_is_refused(kind, bad):
    with pytest.raises(ValueError, match=kind.__name__):
        kind(bad)


@given(st.integers(0, 2**40))
def test_a_range_draws_levels_within_it(seed):
    operator = GlobalTopK((0.3, 0.9))
    drawn = operator.draw(torch.Generator().manual_seed(seed))
    assert 0.3 <= drawn.sparsity <= 0.9
    assert drawn == operator.draw(torch.Generator().manual_seed(seed))


def test_a_range_covers_its_length_and_cannot_compress_by_itself():
    generator = torch.Generator().manual_seed(0)
    drawn = [UniformTopK((0.3, 0.9)).draw(generator).sparsity for _ in range(500)]
    assert min(drawn) < 0.32
    assert max(drawn) > 0.88
    assert abs(sum(drawn) / 500 - 0.6) < 0.03
    weights = compressible_weights(ConvNet())
    with pytest.raises(ValueError, match=r"global:0\.3-0\.9 is a range"):
        GlobalTopK((0.3, 0.9)).compress_(weights)
    assert sparsity(weights) == 0
