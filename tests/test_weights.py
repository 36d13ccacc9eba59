import pytest
import torch
from nets import ConvNet
from torch import nn

from torchcram import CoverageWarning, compressible_weights, masks_of, sparsity
from torchcram.layers import Layout
from torchcram.weights import apply_masks_, reduction_last, weights_in


def test_layers_that_multiply_by_a_matrix_and_nothing_else():
    model = nn.ModuleDict(
        {
            "emb": nn.Embedding(10, 4),
            "conv": nn.Conv1d(4, 4, 3),
            "up": nn.ConvTranspose3d(4, 4, 2),
            "norm": nn.LayerNorm(4),
            "att": nn.MultiheadAttention(4, 2, add_bias_kv=True),
            "cross": nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
            "rnn": nn.LSTM(4, 4, bidirectional=True, proj_size=2),
            "cell": nn.GRUCell(4, 4),
            "fc": nn.Linear(4, 4),
        }
    )
    model.register_parameter("token", nn.Parameter(torch.zeros(3, 3)))
    weights = compressible_weights(model)
    projections = [f"{letter}_proj_weight" for letter in "qkv"]
    recurrent = [f"weight_{kind}_l0{d}" for d in ("", "_reverse") for kind in ("ih", "hh", "hr")]
    assert list(weights) == [
        "conv.weight",
        "up.weight",
        *("att.in_proj_weight", "att.out_proj.weight"),
        *(f"cross.{name}" for name in (*projections, "out_proj.weight")),
        *(f"rnn.{name}" for name in recurrent),
        *("cell.weight_ih", "cell.weight_hh"),
        "fc.weight",
    ]
    assert weights.layouts == {
        "up.weight": Layout(transposed=True),
        "att.in_proj_weight": Layout(layers=3),
    }


def test_tied_weights_appear_once_and_embeddings_never():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    assert list(compressible_weights(model)) == ["a.weight"]
    model = nn.ModuleDict(
        {"emb": nn.Embedding(4, 4), "a": nn.Linear(4, 4), "head": nn.Linear(4, 4)}
    )
    model["head"].weight = model["emb"].weight
    assert list(compressible_weights(model)) == ["a.weight"]


def test_parametrized_layers_do_not_get_in_the_way():
    model = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    with pytest.warns(CoverageWarning, match=r"50% .* compressed: 1\.parametrizations\.weight\."):
        assert list(compressible_weights(model)) == ["0.weight"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["conv1", "up", "fc", "unused"]),
        ({"only": "conv|fc"}, ["conv1", "fc"]),
        ({"skip": r"^fc\."}, ["conv1", "up", "unused"]),
        ({"dense_ends": True}, ["up", "fc"]),
        ({"dense_ends": True, "skip": "up"}, ["fc"]),
    ],
)
def test_options(options, expected):
    found = compressible_weights(ConvNet(), **options)
    assert list(found) == [f"{name}.weight" for name in expected]


@pytest.mark.parametrize("option", ["only", "skip"])
def test_a_pattern_that_matches_nothing_lists_the_names(option):
    with pytest.raises(ValueError, match=r"layer4.*conv1\.weight, up\.weight, fc\.weight"):
        compressible_weights(ConvNet(), **{option: "layer4"})


def test_bad_patterns_and_nothing_left():
    with pytest.raises(ValueError, match="not a regular expression"):
        compressible_weights(ConvNet(), only="(")
    with pytest.raises(ValueError, match="leave no weight"):
        compressible_weights(ConvNet(), skip=".")
    with pytest.raises(ValueError, match="no compressible weights"):
        compressible_weights(nn.Sequential(nn.ReLU(), nn.LayerNorm(3)))
    with pytest.raises(ValueError, match=r"0\.weight.*run one batch"):
        compressible_weights(nn.Sequential(nn.LazyLinear(3)))


def test_the_reduction_dimension_comes_last():
    weights = compressible_weights(ConvNet())
    conv = reduction_last(weights, "conv1.weight")
    up = reduction_last(weights, "up.weight")
    assert conv.shape == (1, 8, 3, 3, 4)
    assert up.shape == (1, 4, 2, 2, 8)
    assert torch.equal(conv[0, 3, 1, 2], weights["conv1.weight"][3, :, 1, 2])
    assert torch.equal(up[0, 3, 1, 0], weights["up.weight"][:, 3, 1, 0])
    with pytest.raises(ValueError, match=r"'b'.*shape \(4,\)"):
        reduction_last({"b": torch.zeros(4)}, "b")


def test_groups_of_transposed_convolutions_are_apart():
    model = nn.Sequential(nn.ConvTranspose2d(8, 6, 3, groups=2))
    weights = compressible_weights(model)
    view = reduction_last(weights, "0.weight")
    assert view.shape == (2, 3, 3, 3, 4)
    assert torch.equal(view[1, 2, 0, 1], weights["0.weight"][4:, 2, 0, 1])


def test_a_plain_mapping_gets_its_layers_back():
    model = ConvNet()
    plain = dict(compressible_weights(model, only="up|fc"))
    assert weights_in(model, plain).layouts == {"up.weight": Layout(transposed=True)}
    with pytest.raises(
        ValueError, match=r"weights\['up.weight'\] is not a parameter of this ConvNet"
    ):
        weights_in(ConvNet(), plain)


def test_masks_zero_without_a_trace_and_come_back_from_zeros():
    weight = torch.tensor([[-1.0, torch.nan], [torch.inf, 2.0]])
    mask = torch.tensor([[False, False], [False, True]])
    apply_masks_({"w": weight}, {"w": mask})
    assert weight.tolist() == [[0, 0], [0, 2]]
    assert not torch.signbit(weight).any()
    assert torch.equal(masks_of({"w": weight})["w"], mask)
    assert sparsity({"w": weight}) == 0.75
    with pytest.raises(ValueError, match="no weights at all"):
        sparsity({})


def test_a_pattern_may_skip_what_is_dense_already():
    model = nn.Module()
    model.embedding, model.layer, model.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
    model.head.weight = model.embedding.weight  # a tied head has the name of the embedding
    assert list(compressible_weights(model, skip="head|classifier")) == ["layer.weight"]
    with pytest.raises(ValueError, match="skip='classifier' matches no compressible weight"):
        compressible_weights(model, skip="classifier")
    with pytest.raises(ValueError, match="only='head' matches no compressible weight"):
        compressible_weights(model, only="head")
