"""What is loaded is what was saved, bit for bit."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nets import OPERATORS, ConvNet, Experts, SequenceNet
from torch import nn

from torchcram import (
    NM,
    Chain,
    GlobalTopK,
    Quantize,
    RowTopK,
    UniformTopK,
    artifact,
    compress,
    compress_,
)
from torchcram.artifact import sparse_layout
from torchcram.artifact.integers import same_bits
from torchcram.layers import LayerWeights, Layout

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
MORE = [
    *(RowTopK(0.5), UniformTopK(0.99), NM(1, 8), NM(3, 5), NM(1, 16), NM(1, 1)),
    *(Quantize(bits) for bits in range(2, 9)),
    *(Quantize(5, 1), Quantize(3, 3), Quantize(8, 8)),
    *(Chain(NM(2, 4), Quantize(4)), Chain(NM(2, 4), Quantize(4, 4)), Chain(NM(1, 4), Quantize(2))),
    *(Chain(GlobalTopK(0.9), Quantize(4)), Chain(UniformTopK(0.5), Quantize(3, 4))),
    *(Chain(Quantize(4), GlobalTopK(0.5)), Chain(Quantize(8), NM(2, 4))),
]

pytestmark = pytest.mark.filterwarnings("ignore:.*(leaves dense|takes one scale)")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("artifact") / "model.safetensors"


def same(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert found[name].is_contiguous()
        assert bool(same_bits(found[name], value).all()), name


def round_trip(path, given, **options):
    """Saves and loads; returns the texts of the encodings."""
    manifest = artifact.save(given, path, **options)
    state = given.state_dict() if isinstance(given, nn.Module) else given
    same(artifact.load(path), state)
    assert artifact.read_manifest(path) == manifest == artifact.verify(path)
    return {name: str(entry.encoding) for name, entry in manifest.tensors.items()}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("operator", [*OPERATORS, *MORE], ids=str)
def test_every_operator_and_type(path, operator, dtype):
    model = ConvNet().to(dtype)
    compress_(model, operator)
    round_trip(path, model, operator=operator)
    twin = ConvNet().to(dtype)
    assert artifact.load(path, twin) is twin
    same(twin.state_dict(), model.state_dict())


@pytest.mark.parametrize("operator", [*OPERATORS, *MORE], ids=str)
def test_layers_that_share_a_weight_or_have_their_inputs_first(path, operator):
    model = SequenceNet()
    compress_(model, operator)
    round_trip(path, model, operator=operator)
    twin = artifact.load(path, SequenceNet())
    same(twin.state_dict(), model.state_dict())
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize(
    ("operator", "encoding"),
    [
        ("nm:2:4", "nm:2:4"),
        ("int4", "dense+int4"),
        ("int4:g32", "dense+int4:g32"),
        ("nm:2:4+int4", "nm:2:4+int4"),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_patterns_and_scales_of_experts_are_found(path, operator, encoding, transposed):
    model = nn.ModuleDict({"experts": Experts(3, 64, 64, transposed=transposed)})
    compress_(model, operator)
    assert set(round_trip(path, model).values()) == {encoding}


@pytest.mark.parametrize(
    ("operator", "encoding"), [("nm:2:4", "nm:2:4"), ("int4:g32", "dense+int4:g32")]
)
def test_patterns_and_scales_of_conv1d_of_transformers_are_found(path, operator, encoding):
    model = nn.Sequential(pytest.importorskip("transformers.pytorch_utils").Conv1D(32, 64))
    compress_(model, operator)
    assert round_trip(path, model)["0.weight"] == encoding


sizes = st.integers(0, 9)
special = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, 3e-39, -3e38, float("inf"), float("nan")])


@st.composite
def tensors(draw):
    """Weights of odd shapes: with empty dimensions, rows of zeros, numbers at the edges."""
    shape = draw(st.lists(sizes, min_size=0, max_size=4))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    tensor *= draw(st.sampled_from([1.0, 1e-38, 1e-42, 1e30]))
    flat = tensor.view(-1)
    for place in draw(st.lists(st.integers(0, max(0, flat.numel() - 1)), max_size=4)):
        if flat.numel():
            flat[place] = draw(special)
    if len(shape) > 1 and shape[0] and draw(st.booleans()):
        tensor[draw(st.integers(0, shape[0] - 1))] = 0
    return tensor


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(tensors(), st.sampled_from([*OPERATORS, *MORE, None]), st.sampled_from(FLOATS), st.data())
def test_odd_tensors(path, tensor, operator, dtype, data):
    tensor = tensor.to(dtype)
    layouts = {}
    if tensor.dim() > 2 and tensor.numel() and data.draw(st.booleans()):
        layouts["weight"] = Layout(transposed=True, groups=2 if len(tensor) % 2 == 0 else 1)
    if operator is not None and tensor.dim() > 1 and tensor.numel():
        operator.compress_(LayerWeights({"weight": tensor}, layouts))
    round_trip(path, {"weight": tensor}, operator=operator)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.integers(2, 8),
    st.integers(0, 1 << 20),
)
def test_integers_are_found_for_all_that_the_quantizer_makes(path, dtype, bits, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(16, 40, generator=generator) * 0.05).to(dtype)
    Quantize(bits).compress_({"weight": weight})
    found = round_trip(path, {"weight": weight})["weight"]
    assert found in (f"dense+int{bits}", f"mask+int{bits}")


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_scale_of_the_quantizer_comes_back_whatever_the_weights(bits):
    largest = (torch.arange(0, 1 << 23, 7, dtype=torch.int32) + (127 << 23)).view(torch.float32)
    levels = 2 ** (bits - 1) - 1
    scale = largest / levels
    assert torch.equal(scale * levels / levels, scale)


def test_encodings_are_what_the_operators_left(path):
    def stored(operator, layer=None):
        model = nn.Sequential(layer or nn.Linear(128, 64))
        compress_(model, operator)
        with_operator = round_trip(path, model, operator=operator)["0.weight"]
        assert round_trip(path, model)["0.weight"] == with_operator
        return with_operator

    assert stored("global:0.9") == "mask"
    assert stored("nm:2:4") == "nm:2:4"
    assert stored("int4") == "dense+int4"
    assert stored("int4:g64") == "dense+int4:g64"
    assert stored("global:0.9+int4") == "mask+int4"
    assert stored("nm:2:4+int4") == "nm:2:4+int4"
    assert stored("nm:2:4+int4:g32") == "nm:2:4+int4:g32"
    assert stored("int8", nn.Conv2d(16, 32, 3)) == "dense+int8"
    assert stored("int8", nn.ConvTranspose2d(32, 16, 3, groups=4)) == "dense+int8"
    assert stored("nm:1:4", nn.ConvTranspose2d(32, 16, 3, groups=4)) == "nm:1:4"
    assert stored("global:0.1", nn.Linear(7, 5)) == "mask"
    assert stored("global:0") == "dense"


def test_a_size_of_groups_that_only_the_operator_tells(path):
    model = nn.Linear(120, 16)
    compress_(model, "int3:g24")
    assert round_trip(path, model, operator="int3:g24")["weight"] == "dense+int3:g24"
    assert round_trip(path, model)["weight"] == "mask"  # some are rounded to zero


def test_buffers_and_other_parameters_stay_dense_and_plain(path):
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    with torch.no_grad():
        model[2].weight.zero_()
    compress_(model, "global:0.5")
    found = round_trip(path, model)
    assert found.pop("1.weight") == "mask"
    assert set(found.values()) == {"dense"}
    plain = load_file(path)
    assert torch.equal(plain["2.running_var"], model[2].running_var)
    assert plain["2.num_batches_tracked"].shape == ()
    artifact.save(nn.Linear(4, 3), path)
    assert load_file(path)["weight"].shape == (3, 4)


@pytest.mark.parametrize("values", [torch.float16, torch.bfloat16], ids=str)
def test_kept_values_are_rounded_as_asked(path, values):
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32))
    compress_(model, "global:0.8")
    manifest = artifact.save(model, path, values=values)
    name = str(values).removeprefix("torch.")
    assert str(manifest.tensors["0.weight"].encoding) == f"mask+{name}"
    found = artifact.load(path)
    assert found["0.weight"].dtype == torch.float32
    assert torch.equal(found["0.weight"], model[0].weight.to(values).float())
    assert torch.equal(found["0.bias"], model[0].bias)
    compress_(model, "int4")
    assert round_trip(path, model, values=values)["0.weight"] == "mask+int4"
    small = nn.Linear(8, 8).to(values)
    assert round_trip(path, small, values=torch.float32)["weight"] == "dense"


def test_values_that_do_not_fit_are_refused(path):
    with pytest.raises(
        ValueError, match=r"'w': it has values that are too large for torch.float16"
    ):
        artifact.save({"w": torch.tensor([[1e6, 1.5]])}, path, values=torch.float16)
    with pytest.raises(ValueError, match=r"values=torch.int8: allowed are torch.float32, "):
        artifact.save({"w": torch.ones(2, 2)}, path, values=torch.int8)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight


def test_tied_weights_are_stored_once(path):
    model = Tied()
    compress_(model, "global:0.5")
    manifest = artifact.save(model, path)
    assert manifest.tied == {"second.weight": "first.weight"}
    assert "second.weight" not in manifest.tensors
    found = artifact.load(path)
    assert found["second.weight"] is found["first.weight"]
    streamed = dict(artifact.stream(path))
    assert streamed["second.weight"] is streamed["first.weight"]
    for state in (found, streamed):
        same({name: state[name] for name in model.state_dict()}, model.state_dict())
    twin = artifact.load(path, Tied())
    assert twin.second.weight is twin.first.weight
    same(twin.state_dict(), model.state_dict())


def test_slices_of_one_tensor_are_not_tied(path):
    whole = torch.randn(8, 8)
    round_trip(path, {"a": whole[:4], "b": whole[4:], "c": whole[:, :4], "d": whole.t()})


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16],
    ids=str,
)
def test_whole_numbers_stay_as_they_are(path, dtype):
    numbers = torch.tensor([[0, 1, 1], [0, 0, 0]]).to(dtype)
    round_trip(path, {"a": numbers, "b": numbers[0, 1].clone(), "c": numbers[:0]})


def test_float8_stays_as_it_is(path):
    numbers = torch.tensor([[0, 1.5, -2]]).to(torch.float8_e4m3fn)
    round_trip(path, {"a": numbers})


def test_those_who_may_read_the_folder_may_read_the_file(tmp_path):
    tmp_path.chmod(0o750)
    artifact.save(nn.Linear(4, 4), tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("operator", [*OPERATORS, *MORE], ids=str)
def test_a_machine_without_the_library_reads_the_same(tmp_path, monkeypatch, operator):
    model, path = ConvNet(), tmp_path / "model.safetensors"
    compress_(model, operator)
    artifact.save(model, path)
    with monkeypatch.context() as patch:
        patch.setattr(sparse_layout, "expand_", lambda *_: False)
        same(artifact.load(path), model.state_dict())
    same(artifact.load(path), model.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", ["int4", "int8", "global:0.5+int4"])
def test_a_file_of_16_bits_in_a_model_of_32(path, dtype, operator):
    torch.manual_seed(0)
    model = compress(nn.Sequential(nn.Linear(33, 17)).to(dtype), operator)
    artifact.save(model, path, operator=operator)
    found = artifact.load(path, nn.Sequential(nn.Linear(33, 17)))
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value.float()), name


def test_two_tensors_are_not_loaded_into_one(path):
    two = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    artifact.save(two, path)
    one = nn.ModuleDict({"a": nn.Linear(8, 8)})
    one["b"] = one["a"]
    before = one["a"].weight.clone()
    with pytest.raises(ValueError, match=r"'a\.\w+' and 'b\.\w+' are two tensors in the file"):
        artifact.load(path, one)
    assert torch.equal(one["a"].weight, before)


def test_a_model_without_memory_is_refused(path):
    artifact.save(nn.Linear(4, 4), path)
    with pytest.raises(ValueError, match=r"'weight' of the model is on the meta device"):
        artifact.load(path, nn.Linear(4, 4, device="meta"))


def test_views_that_overlap_are_stored(path):
    whole = torch.randn(10)
    artifact.save({"all": whole, "some": whole[2:7], "end": whole[5:]}, path)
    found = artifact.load(path)
    assert torch.equal(found["some"], whole[2:7])
    assert torch.equal(found["end"], whole[5:])


def test_threads_may_save_to_one_path(tmp_path):
    path = tmp_path / "model.safetensors"
    states = [{"weight": torch.full((64, 64), float(number))} for number in range(6)]
    with ThreadPoolExecutor(6) as threads:
        for _ in range(5):
            manifests = list(threads.map(lambda state: artifact.save(state, path), states))
            manifest = artifact.verify(path)
            assert manifest in manifests
            assert any(torch.equal(artifact.load(path)["weight"], one["weight"]) for one in states)
    assert list(tmp_path.iterdir()) == [path]
