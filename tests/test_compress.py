import pytest
import torch
from nets import OPERATORS, ConvNet, same, snapshot

from torchcram import GlobalTopK, compress, compress_, compressible_weights, masks_of, sparsity

pytestmark = pytest.mark.filterwarnings("ignore:.*leaves dense")


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_a_copy_is_compressed_and_the_model_is_not(operator):
    model = ConvNet()
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
    with pytest.raises(ValueError, match=r"'fc\.weight' is not a parameter"):
        compress(ConvNet(), GlobalTopK(0.5), weights={"fc.weight": torch.zeros(5, 4)})
