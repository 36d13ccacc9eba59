"""Files that are cut off, altered, foreign or made up are refused by name."""

import hashlib
import json
import math
import zlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nets import same
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from torchcram import artifact, compress_, parse_operator
from torchcram.artifact import encoder_search
from torchcram.artifact.codec import decode


def every_kind_of_part():
    """A small model of whose weights each is stored in another way."""
    torch.manual_seed(0)  # other weights may be stored in other ways
    names = ("mask", "nm", "int", "both", "plain")
    model = nn.ModuleDict({name: nn.Linear(16, 8) for name in names})
    for name, operator in zip(names, ("global:0.9", "nm:2:4", "int4", "nm:2:4+int3"), strict=False):
        compress_(model[name], operator)
    model["tied"] = model["plain"]
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small file with every kind of part in it."""
    path = tmp_path_factory.mktemp("whole") / "model.safetensors"
    model = every_kind_of_part()
    artifact.save(model, path, operator="global:0.9", metadata={"note": "x" * 4000})
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("bad") / "bad.safetensors"


def refused_or_the_same(path, whole):
    """Whether a file is refused; everything else than that or the same content is a failure."""
    try:
        found = artifact.load(path)
    except ValueError as error:
        said = str(error)
    else:
        assert same(found, artifact.load(whole))
        assert artifact.read_manifest(path) == artifact.read_manifest(whole)
        return False
    assert str(path) in said
    with pytest.raises(ValueError, match=r"bad\.safetensors"):
        artifact.verify(path)
    return True


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.booleans())
def test_no_byte_can_be_altered(whole, path, place, change, in_header):
    content = bytearray(whole.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    at = int(place * (header if in_header else len(content) - header))
    at += 0 if in_header else header
    content[at] ^= change
    path.write_bytes(content)
    refused = refused_or_the_same(path, whole)
    assert refused or at < header  # white space at the end of the header


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.floats(0, 1, exclude_max=True))
def test_no_end_can_be_missing(whole, path, part):
    content = whole.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    assert refused_or_the_same(path, whole)


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200), st.booleans())
def test_other_content_is_refused(whole, path, content, after):
    path.write_bytes(whole.read_bytes() + content + b"x" if after else content)
    assert refused_or_the_same(path, whole)


def test_the_message_says_what_is_wrong_and_where(whole, path, tmp_path):
    content = bytearray(whole.read_bytes())
    with safe_open(whole, "pt") as file:
        value = file.get_tensor("plain.weight").numpy().tobytes()
    content[content.index(value) + 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad.safetensors: tensor 'plain.weight': .*checksum"):
        artifact.load(path)
    names = []
    with pytest.raises(ValueError, match=r"tensor 'plain.weight'"):
        names.extend(name for name, _ in artifact.stream(path))
    assert artifact.read_manifest(path) == artifact.read_manifest(whole)  # no tensor is read
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=r"bad.safetensors: it is no compact file of torchcram"):
        artifact.load(path)
    path.write_bytes(content[: len(content) - 1])
    with pytest.raises(ValueError, match=r"bad.safetensors: it is cut off, altered or no safe"):
        artifact.read_manifest(path)
    with pytest.raises(FileNotFoundError):
        artifact.load(tmp_path / "nothing.safetensors")


def test_a_model_is_all_loaded_or_not_at_all(whole, path):
    names = ("mask", "nm", "int", "both", "plain")
    model = nn.ModuleDict({name: nn.Linear(16, 8) for name in names})
    model["tied"] = model["plain"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    content = bytearray(whole.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="checksum"):
        artifact.load(path, model)
    assert same(model.state_dict(), before)
    other = nn.Linear(16, 8)
    with pytest.raises(
        ValueError, match=r"of another model than this Linear: 'bias' is missing in"
    ):
        artifact.load(whole, other)
    model["int"] = nn.Linear(16, 9)
    with pytest.raises(ValueError, match=r"'int.bias' is \(8,\) in the file and \(9,\) here"):
        artifact.load(whole, model)


WRONG = {
    "too few values": {"mask.weight:mask": torch.full((16,), 255, dtype=torch.uint8)},
    "too many values": {"mask.weight:mask": torch.zeros(16, dtype=torch.uint8)},
    "places that do not ascend": {"nm.weight:indices": torch.zeros(16, dtype=torch.uint8)},
    "too many integers": {"int.weight:integers": torch.zeros(65, dtype=torch.uint8)},
    "too few scales": {"both.weight:scales": torch.ones(7)},
    "other booleans": {"flags": torch.full((16, 8), 2, dtype=torch.uint8).view(torch.bool)},
    "another shape": {"plain.weight": torch.ones(129)},
}


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("parts", WRONG.values(), ids=WRONG)
def test_a_model_stays_as_it_was_where_one_tensor_cannot_be_decoded(
    path, parts, library, threads, monkeypatch
):
    if not library:
        monkeypatch.setattr("torchcram.kernels.cpu.decode.find", lambda: None)
    model = every_kind_of_part()
    model.register_buffer("flags", torch.ones(16, 8, dtype=torch.bool))  # the first in the file
    artifact.save(model, path)
    forge(path, path, lambda _: None, parts)
    for value in model.state_dict().values():
        torch.nn.init.ones_(value)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with pytest.raises(ValueError, match="it cannot be decoded"):
        artifact.load(path, model)
    assert same(model.state_dict(), before)


def test_a_model_stays_as_it_was_where_one_of_its_modules_refuses(path):
    class Strict(nn.Linear):
        def _load_from_state_dict(self, state, prefix, *rest):
            super()._load_from_state_dict(state, prefix, *rest)
            if not bool((state[f"{prefix}weight"] == 1).all()):
                self.weight = nn.Parameter(torch.zeros(3))
                raise ValueError("the weights of a Strict layer are ones")

    model = nn.Sequential(nn.Linear(4, 4), Strict(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weight = model[1].weight
    artifact.save({name: value + 2 for name, value in before.items()}, path)
    with pytest.raises(ValueError, match=r"bad\.safetensors: this Sequential refuses it: the weig"):
        artifact.load(path, model)
    assert same(model.state_dict(), before)
    assert model[1].weight is weight


def forge(path, whole, change, parts=None, *, after=None):
    """Writes a file whose checksums are right and whose manifest and parts are changed.

    What `after` changes in the manifest is changed last, and may be a checksum.
    """
    with safe_open(whole, "pt") as file:
        manifest = json.loads(file.metadata()["torchcram"])
    tensors = load_file(whole)
    tensors.update(parts or {})
    change(manifest)
    for name, entry in dict(manifest["tensors"]).items():
        keys = [key for key in sorted(tensors) if key == name or key.startswith(f"{name}:")]
        seen = b"".join(tensors[key].numpy().tobytes() for key in keys)
        if isinstance(entry, dict):
            entry["crc32"] = zlib.crc32(seen)
            entry["sha256"] = entry["sha256"] and hashlib.sha256(seen).hexdigest()
    if after is not None:
        after(manifest)
    text = json.dumps(manifest)
    save_file(
        tensors,
        path,
        {"torchcram": text, "torchcram.sha256": hashlib.sha256(text.encode()).hexdigest()},
    )


def set_in(*keys, to):
    def change(manifest):
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = to

    return change


MASK, NM, INT = ("tensors", "mask.weight"), ("tensors", "nm.weight"), ("tensors", "int.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("format", to=2), "of format 2, and this version of torchcram reads up to 1"),
        (set_in("format", to=True), "format"),
        (set_in("extra", to=1), "the manifest does not have the keys"),
        (set_in("operator", to=3), "has 3 as operator"),
        (set_in("tensors", to=[]), "as tensors"),
        (set_in("tied", to={"x": "y"}), "ties 'x' to 'y'"),
        (set_in("tied", to={"x": ["y"]}), "ties 'x'"),
        (set_in("metadata", to=None), "as metadata"),
        (set_in(*MASK, to=5), "the entry of 'mask.weight' does not have"),
        (set_in(*MASK, "shape", to=[8, 15]), "'mask.weight': it cannot be decoded"),
        (set_in(*MASK, "shape", to=[8, 10**15]), "'mask.weight': it cannot be decoded"),
        (set_in(*MASK, "shape", to=[8, 1 << 80]), "has the shape"),
        (set_in(*MASK, "shape", to=[0, 1 << 62, 1 << 62]), "'mask.weight': it cannot be decoded"),
        (set_in(*MASK, "shape", to=[-8, -16]), "has the shape"),
        (set_in(*MASK, "shape", to=[(1 << 63) - 1] * 80_000), "has 80000 dimensions; allowed are"),
        (set_in(*MASK, "shape", to=[1] * 7 + [8, 16]), "has 9 dimensions; allowed are up to 8"),
        (set_in(*MASK, "shape", to=[1 << 31, 1 << 31]), "too large for any memory"),
        (set_in(*MASK, "shape", to=[(1 << 63) - 1] * 8), "too large for any memory"),
        (set_in(*MASK, "dtype", to="int32"), "'mask.weight': it cannot be decoded: its values"),
        (set_in(*INT, "dtype", to="int32"), "stores int32 as dense\\+int4"),
        (set_in(*MASK, "encoding", to="mask+" + "float16" * 999), "is no encoding"),
        (set_in(*MASK, "dtype", to="float64"), "'mask.weight': it cannot be decoded: its values"),
        (set_in(*MASK, "dtype", to="object"), "unknown dtype"),
        (set_in(*MASK, "sha256", to=""), "no checksum"),
        (set_in(*MASK, "encoding", to="eval"), "'eval' is no encoding"),
        (set_in(*MASK, "encoding", to="nm:9:4"), "keeps 9 of every 4"),
        (set_in(*MASK, "encoding", to="nm:0:0"), "keeps 0 of every 0"),
        (set_in(*MASK, "encoding", to="dense"), "'mask.weight' is missing"),
        (set_in(*MASK, "encoding", to="mask+int4:g0"), "groups of size 0"),
        (set_in(*MASK, "encoding", to="mask+float16"), "its values are"),
        (set_in(*NM, "encoding", to="nm:1:3"), "'nm.weight': it cannot be decoded"),
        (set_in(*NM, "encoding", to="nm:2:8"), "'nm.weight': it cannot be decoded"),
        (set_in(*NM, "transposed", to=3), "'nm.weight': it cannot be decoded"),
        (set_in(*NM, "transposed", to=0), "has 0 groups"),
        (set_in(*NM, "transposed", to=1 << 63), "has 9223372036854775808 groups"),
        (set_in(*NM, "transposed", to=(1 << 63) - 1), "'nm.weight': it cannot be decoded"),
        (set_in(*NM, "transposed", to="a"), "as transposed"),
        (set_in(*INT, "encoding", to="dense+int5"), "'int.weight': it cannot be decoded"),
        (set_in(*INT, "encoding", to="dense+int4:g5"), "no multiple of 5"),
        (set_in(*INT, "encoding", to="dense+int4:g8"), "its scales are"),
        (set_in(*INT, "shape", to=[128]), "'int.weight': it cannot be decoded"),
        (lambda manifest: manifest["tensors"].pop("int.bias"), "has no entry for 'int.bias'"),
    ],
)
def test_made_up_manifests_are_refused(whole, path, change, message):
    forge(path, whole, change)
    with pytest.raises(ValueError, match=message) as caught:
        artifact.load(path)
    assert str(path) in str(caught.value)


def test_no_memory_is_taken_for_a_size_that_the_parts_do_not_have(whole, path, monkeypatch):
    forge(path, whole, set_in(*MASK, "shape", to=[8, 1 << 24]))
    sizes, empty = [], torch.empty

    def watched(*args, **kwargs):
        memory = empty(*args, **kwargs)
        sizes.append(memory.numel() if memory.device.type != "meta" else 0)
        return memory

    monkeypatch.setattr(torch, "empty", watched)
    with pytest.raises(ValueError, match=r"'mask\.weight': it cannot be decoded"):
        artifact.load(path)
    assert all(size < 1 << 20 for size in sizes)


def test_one_part_is_not_that_of_two_tensors(whole, path):
    def change(manifest):
        mask = manifest["tensors"]["mask.weight"]
        manifest["tensors"]["mask.weight:values"] = {**mask, "shape": [13], "encoding": "dense"}

    forge(path, whole, change)
    with pytest.raises(ValueError, match=r"bad\.safetensors: its manifest gives one part to two"):
        artifact.load(path)


def test_only_verify_compares_the_long_checksum(whole, path):
    forge(path, whole, lambda _: None, after=set_in(*MASK, "sha256", to="0" * 64))
    artifact.load(path)
    with pytest.raises(ValueError, match=r"'mask\.weight'"):
        artifact.verify(path)


def test_what_does_not_come_back_as_it_was_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(encoder_search, "decode", lambda parts, spec: decode(parts, spec) + 1)
    with pytest.raises(RuntimeError, match="is not restored bit for bit"):
        artifact.save({"weight": torch.randn(4, 4)}, tmp_path / "net")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"mask.weight:mask": torch.full((16,), 255, dtype=torch.uint8)}, "only 13 values"),
        ({"mask.weight:mask": torch.zeros(16, dtype=torch.uint8)}, "13 values for 0 places"),
        ({"int.weight:scales": torch.ones(2, 4)[:, :3].contiguous()}, "its scales are 6"),
        ({"int.weight:scales": torch.ones(1, 8)}, r"its scales have the shape \(1, 8\)"),
        ({"int.weight:scales": torch.ones(2, 4)}, r"its scales have the shape \(2, 4\)"),
        ({"mask.weight:mask": torch.zeros(16, 1, dtype=torch.uint8)}, "its mask have the shape"),
    ],
)
def test_made_up_parts_are_refused(whole, path, part, message):
    forge(path, whole, lambda _: None, part)
    with pytest.raises(ValueError, match=message):
        artifact.load(path)


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("operator", ["nm:2:4", "nm:3:8"])
def test_places_of_a_group_ascend(path, operator, library, monkeypatch):
    if not library:
        monkeypatch.setattr("torchcram.kernels.cpu.decode.find", lambda: None)
    weight = torch.randn(4, 16)
    parse_operator(operator).compress_({"weight": weight})
    artifact.save({"weight": weight}, path, operator=operator)
    assert torch.equal(artifact.load(path)["weight"], weight)
    whole = load_file(path)["weight:indices"]
    for changed in (torch.zeros_like(whole), whole.flip(0).bitwise_not()):  # alike, descending
        forge(path, path, lambda _: None, {"weight:indices": changed})
        with pytest.raises(ValueError, match="'weight': it cannot be decoded"):
            artifact.load(path)


@pytest.mark.parametrize(
    ("code", "count"), [("F6_E2M3", 16), ("F4", 24), ("F8_E8M0", 12), ("C64", 1), ("F5", 3)]
)
def test_parts_of_foreign_types_are_refused(path, code, count):
    artifact.save({"a": torch.ones(3 if code != "C64" else 2)}, path)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["a"].update(dtype=code, shape=[count])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    for read in (artifact.load, artifact.verify, lambda path: list(artifact.stream(path))):
        with pytest.raises(ValueError, match=r"bad\.safetensors: "):
            read(path)


def test_a_part_without_dimensions_is_refused(path):
    weight = torch.tensor([[1.0, -1.0]])
    artifact.save({"weight": weight}, path, operator="int8")
    scales = {name: value for name, value in load_file(path).items() if "scales" in name}
    assert scales, "stored in another way"
    forge(path, path, lambda _: None, {name: value.squeeze() for name, value in scales.items()})
    with pytest.raises(ValueError, match=r"its scales have the shape \(\), not one dimension"):
        artifact.load(path)


def test_a_place_outside_its_group_is_refused(path):
    weight = torch.randn(8, 15)
    operator = parse_operator("nm:1:5")
    operator.compress_({"weight": weight})
    artifact.save({"weight": weight}, path, operator=operator)
    indices = {"weight:indices": torch.full((9,), 255, dtype=torch.uint8)}
    forge(path, path, lambda _: None, indices)
    with pytest.raises(ValueError, match=r"'weight': .* an index is outside its group of 5"):
        artifact.load(path)


def test_text_in_place_of_a_manifest_is_refused(path):
    for text in ("", "[1]", "{", '{"format": NaN}', "[" * 100_000, '"' + "a" * 100):
        said = {"torchcram": text, "torchcram.sha256": hashlib.sha256(text.encode()).hexdigest()}
        save_file({"a": torch.ones(2)}, path, said)
        with pytest.raises(ValueError, match=r"bad.safetensors: "):
            artifact.load(path)


def test_what_cannot_be_stored_is_refused_by_name(path):
    for value, message in (
        ("text", "'a.b' is str, not a tensor"),
        (
            torch.ones(2, dtype=torch.complex64),
            "'a.b' is a torch.strided tensor of torch.complex64",
        ),
        (torch.ones(2, 2).to_sparse(), "'a.b' is a torch.sparse_coo tensor"),
        (torch.ones(2, device="meta"), "on meta"),
        (torch.ones([1] * 9), "'a.b' has 9 dimensions; allowed are up to 8"),
    ):
        with pytest.raises(ValueError, match=message):
            artifact.save({"a.b": value}, path)
    sparse = torch.randn(32, 32).relu()
    assert str(artifact.save({"a": sparse}, path).tensors["a"].encoding) == "mask"
    artifact.save({"a": sparse, "a:scales": sparse}, path)
    assert torch.equal(artifact.load(path)["a"], sparse)
    with pytest.raises(ValueError, match=r"cannot be stored beside a tensor named 'a:mask'"):
        artifact.save({"a:mask": torch.ones(3), "a": sparse}, path)
    with pytest.raises(ValueError, match="'__metadata__'"):
        artifact.save({"__metadata__": torch.ones(3)}, path)
    for bad in (math.nan, object(), {1, 2}):
        with pytest.raises(ValueError, match="the metadata cannot be written as JSON"):
            artifact.save({"a": sparse}, path, metadata={"bad": bad})


def test_a_failed_save_leaves_the_earlier_file(path, monkeypatch):
    artifact.save({"a": torch.eye(4)}, path, metadata={"run": 1})

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="full"):
        artifact.save({"a": torch.ones(4, 4)}, path)
    assert torch.equal(artifact.load(path)["a"], torch.eye(4))
    assert artifact.read_manifest(path).metadata == {"run": 1}
    assert [one.name for one in path.parent.iterdir()] == [path.name]
