"""The encoding is seen from every tensor, whatever it belongs to."""

import pytest
import torch
from torch import nn

from torchcram import NM, Chain, GlobalTopK, Quantize, artifact, compress_, parse_operator
from torchcram.artifact.integers import same_bits
from torchcram.pruners import Obs, Wanda


class Scores(nn.Module):
    """A layer that the library does not know."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 128))
        self.kernel = nn.Parameter(torch.randn(8, 16, 3, 3))
        self.gains = nn.Parameter(torch.randn(2048))
        self.register_buffer("positions", torch.randn(32, 64))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.scores = Scores()
        self.attention = nn.MultiheadAttention(64, 4)
        self.recurrent = nn.LSTM(64, 32)
        self.words = nn.Embedding(40, 64)
        self.norm = nn.LayerNorm(64)
        self.bare = nn.Parameter(torch.randn(64, 64))


def pruned(model, operator="uniform:0.9"):
    """Compresses every matrix of a model, compressible or not."""
    matrices = {name: value for name, value in model.state_dict().items() if value.dim() > 1}
    parse_operator(operator).compress_(matrices)
    return model


def saved(path, given, **options):
    """Returns the encodings and the size of a file, which gives back what was saved."""
    manifest = artifact.save(given, path, **options)
    state = given.state_dict() if isinstance(given, nn.Module) else given
    found = artifact.load(path)
    assert list(found) == list(state)
    for name, value in state.items():
        assert bool(same_bits(found[name], value).all()), name
    texts = {name: str(entry.encoding) for name, entry in manifest.tensors.items()}
    return texts, path.stat().st_size


@pytest.mark.parametrize(
    ("operator", "places"),
    [("uniform:0.9", "mask"), ("nm:1:8", "nm:1:8"), ("int4", "dense+int4"), ("nm:1:8+int4", None)],
)
def test_a_file_of_a_model_is_as_large_as_one_of_its_state_dict(tmp_path, operator, places):
    model = pruned(Net(), operator)
    encodings, size = saved(tmp_path / "model", model)
    assert saved(tmp_path / "state", model.state_dict()) == (encodings, size)
    for name, value in model.state_dict().items():
        expected = "dense" if value.dim() < 2 else (places or encodings[name])
        assert encodings[name] == expected, name
        assert expected != "dense" or value.dim() < 2
    assert size < 0.3 * sum(4 * value.numel() for value in model.state_dict().values())


def test_vectors_are_looked_at_where_it_pays(tmp_path):
    model = Net()
    with torch.no_grad():
        model.scores.gains[100:] = 0
        model.norm.weight.zero_()
    encodings, size = saved(tmp_path / "model", model)
    assert encodings["scores.gains"] == "mask"
    assert encodings["norm.weight"] == encodings["first.bias"] == "dense"
    assert saved(tmp_path / "state", model.state_dict()) == (encodings, size)
    state = {"a": torch.zeros(5000), "b": torch.full((5000,), -0.0), "c": torch.randn(5000)}
    assert list(saved(tmp_path / "state", state)[0].values()) == ["mask", "dense", "dense"]


def test_layouts_that_nobody_tells_are_tried(tmp_path):
    inputs_first = torch.randn(32, 48)  # as in Conv1D of Transformers
    Quantize(4).compress_({"": inputs_first.t()})
    experts = torch.randn(4, 24, 32)  # (experts, outputs, inputs)
    Quantize(8).compress_({str(i): expert for i, expert in enumerate(experts)})
    turned = nn.ConvTranspose2d(16, 8, 3)
    compress_(turned, "int8")
    state = {"inputs first": inputs_first, "experts": experts, "turned": turned.weight.detach()}
    encodings, _ = saved(tmp_path / "state", state)
    assert encodings == {
        "inputs first": "dense+int4",
        "experts": "dense+int8",
        "turned": "dense+int8",
    }


def test_layers_tell_what_tensors_do_not(tmp_path):
    model = nn.Sequential(nn.ConvTranspose2d(32, 16, 3, groups=4))
    compress_(model, "nm:1:4+int4")
    encodings, size = saved(tmp_path / "model", model)
    assert encodings["0.weight"] == "nm:1:4+int4"
    assert size < saved(tmp_path / "state", model.state_dict())[1]


def test_only_compressible_weights_of_a_model_are_rounded(tmp_path):
    model = pruned(Net())
    manifest = artifact.save(model, tmp_path / "model", values=torch.float16)
    found = artifact.load(tmp_path / "model")
    assert str(manifest.tensors["first.weight"].encoding) == "mask+float16"
    assert torch.equal(found["first.weight"], model.first.weight.half().float())
    for name in ("bare", "scores.table", "scores.positions", "words.weight"):
        assert str(manifest.tensors[name].encoding) == "mask"
        assert torch.equal(found[name], model.state_dict()[name])


@pytest.mark.parametrize(
    "operator",
    [
        "obs:m64@global:0.9",
        "obs:m256:b25:d1e-05:r2@nm:2:4+int8",
        "sparsegpt:b64:d0.1@row:0.5+wanda@nm:2:4",
        Obs(GlobalTopK(0.9), gradients=64),
        Chain(Wanda(NM(2, 4)), Quantize(8)),
    ],
    ids=str,
)
def test_operators_with_pruners_and_their_options_are_kept(tmp_path, operator):
    manifest = artifact.save({"a": torch.eye(8)}, tmp_path / "file", operator=operator)
    assert manifest.operator == str(operator)
    assert artifact.read_manifest(tmp_path / "file").operator == str(operator)


@pytest.mark.parametrize(
    "operator", ["wanda@nm:2:6+int4:g12", Chain(Wanda(NM(2, 6)), Quantize(4, 12))]
)
def test_pruners_leave_hints(tmp_path, operator):
    weight = torch.randn(16, 48)
    parse_operator("nm:2:6+int4:g12").compress_({"": weight})
    encodings, _ = saved(tmp_path / "file", {"weight": weight}, operator=operator)
    assert encodings == {"weight": "nm:2:6+int4:g12"}


def test_the_order_of_earlier_versions_works_with_a_warning(tmp_path):
    model = nn.Linear(4, 4)
    for path in (tmp_path / "file", str(tmp_path / "file")):
        for given in (model, model.state_dict()):
            with pytest.warns(DeprecationWarning, match=r"call artifact\.save\(model, path\)") as w:
                artifact.save(path, given, metadata={"run": 1})
            assert w[0].filename == __file__
            assert torch.equal(artifact.load(path)["weight"], model.weight)
    assert artifact.save(path=path, model=model) == artifact.read_manifest(path)


def test_what_is_no_model_and_no_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model must be a module or a state dict, got Tensor"):
        artifact.save(torch.ones(2), tmp_path / "file")
    with pytest.raises(ValueError, match="path must be a str or a path, got Linear"):
        artifact.save(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="model must be a module or a state dict, got str"):
        artifact.save("a", "b")
