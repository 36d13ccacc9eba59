import pytest
import torch
from nets import OPERATORS, ConvNet, SequenceNet, same, snapshot
from torch import nn

from torchcram import (
    CrAM,
    GlobalTopK,
    Operator,
    compress,
    compress_,
    compressible_weights,
    masks_of,
    sparsity,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*leaves dense")


@pytest.mark.parametrize("net", [ConvNet, SequenceNet])
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_a_copy_is_compressed_and_the_model_is_not(operator, net):
    model = net()
    before = snapshot(model)
    twin = compress(model, operator)
    assert same(snapshot(model), before)
    masks = compress_(model, operator)
    assert same(snapshot(model), snapshot(twin))
    if masks is not None:
        assert all(
            torch.equal(m, masks[n]) for n, m in masks_of(compressible_weights(twin)).items()
        )


def test_text_and_a_choice_of_weights():
    model = ConvNet()
    weights = compressible_weights(model, skip="fc")
    twin = compress(model, "uniform:0.5", weights=weights)
    assert sparsity({"fc": twin.fc.weight}) == 0
    assert sparsity(compressible_weights(twin, skip="fc")) == 0.5
    assert sparsity(dict(twin.named_parameters())) < 0.5


def test_transposed_layers_stay_known_in_the_copy():
    model = ConvNet()
    twin = compress(model, "nm:2:4", weights=compressible_weights(model, only="up"))
    assert twin.up.weight.ne(0).sum(0).eq(4).all()  # 4 of 8 input channels at every place


def test_foreign_weights_are_refused():
    with pytest.raises(ValueError, match=r"'fc\.weight'\] is not a parameter"):
        compress(ConvNet(), GlobalTopK(0.5), weights={"fc.weight": torch.zeros(5, 4)})


def test_in_place_too_only_on_weights_of_the_model():
    model, other = ConvNet(), ConvNet()
    with pytest.raises(ValueError, match="is not a parameter"):
        compress_(other, "global:0.9", weights=compressible_weights(model))
    assert sparsity(compressible_weights(model)) == 0


@pytest.mark.parametrize("target", ["global:0.3-0.9", "global:0.5+uniform:0.3-0.9"])
def test_a_range_is_refused_before_anything_is_touched(target):
    model = ConvNet()
    with pytest.raises(ValueError, match="range to train over"):
        compress_(model, target)
    assert sparsity(compressible_weights(model)) == 0


def test_what_is_no_operator_is_refused():
    with pytest.raises(ValueError, match=r"0\.9 is neither an Operator nor text"):
        compress_(ConvNet(), 0.9)


def test_compression_inside_autocast_is_seen():
    model = ConvNet().eval()
    x = torch.randn(2, 4, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        compress_(model, "global:0.9")
        after = model(x)
    assert not torch.equal(before, after)


def test_operators_of_others_need_no_decoration():
    class Halve(Operator):
        def compress_(self, weights):
            for weight in weights.values():
                weight.mul_(0.5)

    model = ConvNet()
    before = model.fc.weight.detach().clone()
    assert compress_(model, Halve()) is None
    assert torch.equal(model.fc.weight, before * 0.5)


def test_no_weights_at_all_are_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="weights is empty: there is nothing to compress"):
        compress(model, "global:0.5", weights={})
    with pytest.raises(ValueError, match="weights is empty"):
        CrAM(model, torch.optim.SGD(model.parameters(), lr=0.1), "global:0.5", weights={})


def test_an_average_is_compressed_where_the_model_was_trained():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    average = torch.optim.swa_utils.AveragedModel(model)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    for trained in (model, torch.compile(model, backend="eager")):
        names = [name for name, _ in trained.named_parameters()]
        weights = {names[0]: dict(trained.named_parameters())[names[0]]}
        optimizer = CrAM(trained, base, "global:0.5", weights=weights)
        small = optimizer.compress("global:0.5", average.module)
        assert small is not average.module
        assert (small[0].weight == 0).float().mean() == 0.5
        assert (small[1].weight != 0).all()
    with pytest.raises(
        ValueError, match=r"^.*0\.weight: trained for compression, but no parameter"
    ):
        optimizer.compress("global:0.5", nn.Linear(8, 8))


def test_a_layer_that_was_replaced_is_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = CrAM(model, torch.optim.SGD(model.parameters(), lr=0.1), "global:0.5")
    model[1] = nn.Linear(8, 2)
    with pytest.raises(ValueError, match=r"^1\.weight: trained .*a layer that was replaced needs"):
        optimizer.compress("global:0.5")
