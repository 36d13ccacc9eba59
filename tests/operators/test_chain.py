import pytest
import torch

from torchcram import NM, Chain, GlobalTopK, Quantize


def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(8, 8, generator=generator),
        "b": torch.randn(4, 8, generator=generator),
    }


def test_one_after_the_other_and_the_mask_of_both():
    chained, by_hand = weights(), weights()
    masks = Chain(NM(2, 4), GlobalTopK(0.75)).compress_(chained)
    first = NM(2, 4).compress_(by_hand)
    then = GlobalTopK(0.75).compress_(by_hand)
    for name in chained:
        assert torch.equal(chained[name], by_hand[name])
        assert torch.equal(masks[name], first[name] & then[name])


def test_a_chain_without_masks_has_none():
    assert Chain(Quantize(8), Quantize(4)).compress_(weights()) is None


def test_nesting_does_not_matter():
    a, b, c = GlobalTopK(0.5), NM(2, 4), Quantize(8)
    assert Chain(a, Chain(b, c)) == Chain(Chain(a, b), c)
    assert str(Chain(a, Chain(b, c))) == "global:0.5+nm:2:4+int8"


def test_old_masks_and_new_scales():
    operator = Chain(GlobalTopK(0.5), Quantize(4))
    masks = operator.compress_(weights())
    again = {name: w * 3 + 0.1 for name, w in weights().items()}
    by_hand = {name: w.masked_fill(~masks[name], 0) for name, w in again.items()}
    Quantize(4).compress_(by_hand)
    operator.recompress_(again, masks)
    assert all(torch.equal(again[name], by_hand[name]) for name in again)


def test_draws_all_its_parts():
    drawn = Chain(GlobalTopK((0.3, 0.9)), Quantize(4)).draw(torch.Generator().manual_seed(1))
    assert isinstance(drawn.first.sparsity, float)
    with pytest.raises(ValueError, match="not an Operator"):
        Chain(GlobalTopK(0.5), "int8")
