"""Tables of embeddings in compact files."""

import copy

import pytest
import torch
from torch import nn

from torchcram import Quantize, artifact, compress_
from torchcram.artifact.integers import same_bits
from torchcram.artifact.writer import round_as_saved_


class Net(nn.Module):
    """Words, and scores for words; the two share a table if `tied`."""

    def __init__(self, *, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(100, 16, padding_idx=0)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 100, bias=False)
        if tied:
            self.head.weight = self.words.weight


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("to", "encoding"), [("int8", "dense+int8"), ("int4:g8", "dense+int4:g8"), (Quantize(4), None)]
)
def test_tables_are_rounded_as_asked_and_nothing_else(tmp_path, to, encoding, tied):
    model, path = Net(tied=tied), tmp_path / "net.safetensors"
    before = copy.deepcopy(model.state_dict())
    manifest = artifact.save(model, path, embeddings=to)
    rounded = {"words.weight": before["words.weight"].clone()}
    (to if isinstance(to, Quantize) else Quantize(int(to[3]), 8 if ":" in to else None)).compress_(
        rounded
    )
    found = artifact.load(path)
    assert torch.equal(found["words.weight"], rounded["words.weight"])
    assert torch.equal(found["inner.weight"], before["inner.weight"])
    assert torch.equal(found["head.weight"], found["words.weight"]) == tied
    assert manifest.tensors["words.weight"].encoding.bits == (8 if to == "int8" else 4)
    if encoding is not None:
        assert str(manifest.tensors["words.weight"].encoding) == encoding
    for name, value in model.state_dict().items():  # the model is not touched
        assert torch.equal(value, before[name])


def test_tables_that_are_rounded_already_are_found_and_written_again(tmp_path):
    model = Net()
    first = artifact.save(model, tmp_path / "one", embeddings="int8")
    artifact.load(tmp_path / "one", model)
    again = artifact.save(model, tmp_path / "two")
    assert again.tensors["words.weight"] == first.tensors["words.weight"]
    assert (tmp_path / "two").stat().st_size == (tmp_path / "one").stat().st_size
    twice = artifact.save(model, tmp_path / "three", embeddings="int8")
    assert twice.tensors["words.weight"] == first.tensors["words.weight"]


def test_values_are_not_for_tables(tmp_path):
    model = Net()
    manifest = artifact.save(model, tmp_path / "net", values=torch.float16)
    assert str(manifest.tensors["words.weight"].encoding) == "dense"
    assert str(manifest.tensors["inner.weight"].encoding) == "dense+float16"


@pytest.mark.parametrize(
    ("model", "to", "said"),
    [
        (Net(), "uniform:0.5", "'uniform:0.5': allowed are int2 to int8"),
        (nn.Linear(4, 4), "int8", "the model has none"),
        (Net().state_dict(), "int8", "a state dict does not tell"),
    ],
)
def test_what_cannot_be_rounded_is_refused_before_a_file_is_there(tmp_path, model, to, said):
    with pytest.raises(ValueError, match=said):
        artifact.save(model, tmp_path / "net", embeddings=to)
    assert not list(tmp_path.iterdir())


def test_a_table_that_another_layer_has_first_is_found(tmp_path):
    class Reversed(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 50, bias=False)
            self.words = nn.Embedding(50, 16)
            self.words.weight = self.head.weight

    manifest = artifact.save(Reversed(), tmp_path / "net", embeddings="int8")
    assert str(manifest.tensors["head.weight"].encoding) == "dense+int8"
    assert manifest.tied == {"words.weight": "head.weight"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("embeddings", [None, "int8", "int4:g8"])
@pytest.mark.parametrize("values", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operator", ["global:0.9", "nm:2:4+int4", "int8", "wanda@uniform:0.5"])
def test_rounding_in_memory_gives_what_a_file_gives_back(
    tmp_path, operator, values, embeddings, tied
):
    model = Net(tied=tied)
    compress_(model, operator.removeprefix("wanda@"))
    rounding = {"operator": operator, "values": values, "embeddings": embeddings}
    artifact.save(model, tmp_path / "net", **rounding)
    before = copy.deepcopy(model.state_dict())
    round_as_saved_(model, **rounding)
    found = model.state_dict()
    for name, value in artifact.load(tmp_path / "net").items():
        assert found[name].dtype == value.dtype
        assert bool(same_bits(found[name], value).all()), name
    changed = [name for name, value in before.items() if not torch.equal(found[name], value)]
    assert bool(changed) == (
        embeddings is not None or (values is not None and "int" not in operator)
    )
    assert (model.head.weight is model.words.weight) == tied
    with pytest.raises(ValueError, match="float16"):
        round_as_saved_(model, values=torch.float64)
