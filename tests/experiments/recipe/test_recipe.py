import json
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import same, snapshot
from recipe_digests import FILE, digests

import torchcram
from torchcram import compressible_weights
from torchcram.experiments.data.images import AUGMENTS
from torchcram.experiments.io.yaml_text import dump, parse
from torchcram.experiments.models import build_model
from torchcram.experiments.recipe import (
    CompressConfig,
    CramConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Recipe,
    ScheduleConfig,
    TrainConfig,
    load_recipe,
    recipe_names,
)
from torchcram.experiments.recipe import loading as module
from torchcram.experiments.recipe.build import build_optimizer
from torchcram.experiments.recipe.schema import OPTIMIZERS, PRECISIONS, SCHEDULES
from torchcram.experiments.training.steps import Objective, train_on
from torchcram.optim.rules import RULES

HIGH = tuple(f"global:{level}" for level in (0.5, 0.7, 0.8, 0.9, 0.95))
SGD20 = "cifar10/resnet20/sgd"
MULTI20 = "cifar10/resnet20/cram-plus-multi"
FAMILY20 = Path(torchcram.__file__).parent / "recipes" / "cifar10" / "resnet20.yaml"
SMALL = ("resnet20", "convnet-digits")  # so small that every recipe of theirs takes a step
ALL = {name: load_recipe(name) for name in recipe_names()}
EVERY = {  # those about texts are tested in text/
    name: recipe for name, recipe in ALL.items() if recipe.text is None and recipe.task is None
}

fractions = st.floats(0, 1, exclude_max=True)
operators = st.sampled_from(["global:0.5", "uniform:0.25", "nm:2:4", "int4:g64", "global:0.5+int8"])
parts = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True)
crams = st.builds(
    CramConfig,
    st.sampled_from([name for name, rule in RULES.items() if rule.compresses]),
    st.lists(operators | st.just("global:0.3-0.9"), min_size=1, max_size=3).map(tuple),
    st.floats(0, 10),
    st.booleans(),
    st.none() | st.booleans(),
    st.integers(1, 1000),
    st.floats(0, 1),
    st.booleans(),
    st.none() | st.just("^conv"),
)
recipes = st.builds(
    Recipe,
    st.tuples(parts, parts, parts).map("/".join),
    st.text(min_size=1, max_size=20).filter(str.strip),
    st.builds(DataConfig, parts, st.sampled_from(AUGMENTS), st.integers(1, 999)),
    st.builds(ModelConfig, st.sampled_from(["resnet20", "torchvision/vgg11"])),
    st.builds(
        TrainConfig,
        st.integers(9, 999),
        st.integers(1),
        st.sampled_from(PRECISIONS),
        fractions,
        ema=st.none() | fractions.filter(bool),
    ),
    st.builds(OptimizerConfig, st.sampled_from(OPTIMIZERS), st.floats(0, 10), fractions, fractions),
    st.builds(ScheduleConfig, st.sampled_from(SCHEDULES), st.integers(0, 9)),
    st.builds(CompressConfig, st.lists(operators, min_size=1, unique=True).map(tuple)),
    st.none() | crams,
)


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads that wait for each other take longer than nets this small, on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@given(recipes)
def test_plain_data_yaml_and_json_give_the_recipe_back(recipe):
    data = recipe.to_dict()
    assert Recipe.from_dict(data) == recipe
    assert Recipe.from_dict(json.loads(json.dumps(data))) == recipe
    assert Recipe.from_dict(parse(dump(data), "a file")) == recipe


@given(recipes)
def test_every_value_can_be_overridden(recipe):
    data = load_recipe(SGD20).to_dict() | {"cram": None}
    texts = []
    for key, value in recipe.to_dict().items():
        inner = value if isinstance(value, dict) else {}
        texts += [f"{key}.{name}={dump(item)}" for name, item in inner.items()]
        texts += [] if inner else [f"{key}={dump(value)}"]
    assert Recipe.from_dict(module.yaml_text.override(data, texts)) == recipe


def parameters_of(recipe):
    with torch.device("meta"):
        model = build_model(recipe.model.name, classes=10)
    cram = recipe.cram
    return compressible_weights(model, only=cram.only, skip=cram.skip, dense_ends=cram.dense_ends)


@pytest.mark.parametrize("name", EVERY)
def test_every_recipe_is_in_order(name):
    recipe = EVERY[name]
    assert recipe.name == name
    assert recipe.task_name == recipe.data.name
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    plain = ("sgd", "sgd-2x", "adamw", "adamw-2x", "transfer")
    assert (recipe.cram is None and recipe.method is None) == (recipe.method_name in plain)
    if (cram := recipe.cram) is not None:
        weights = parameters_of(recipe)
        assert "conv1.weight" not in weights or not any("nm:" in text for text in cram.operators)
        assert recipe.title.startswith(cram.rule)
        assert recipe.compress.dense_ends == cram.dense_ends


def shape_of(recipe):
    return (2, 1, 8, 8) if recipe.task_name == "digits" else (2, 3, 32, 32)


def cases():
    """One recipe for all that would take the very same step; of large models one plain step each.

    What CrAM does to those is in the recipes of the small ones, and all its arguments are checked
    above. The other methods of large models train a small one.
    """
    found = {}
    for recipe in EVERY.values():
        alike = recipe
        if recipe.model.name not in SMALL and recipe.method is None:
            alike = replace(recipe, cram=None)
        elif recipe.model.name not in SMALL:
            alike = replace(recipe, model=EVERY[SGD20].model)
        method = None if alike.method is None else (alike.method.name, str(alike.method.args))
        found.setdefault((alike.model.name, alike.cram, method), alike)
    return [pytest.param(recipe, id=recipe.name) for recipe in found.values()]


@pytest.mark.parametrize("recipe", cases())
def test_every_recipe_runs_a_batch(recipe):
    model = build_model(recipe.model.name, classes=10)
    optimizer = build_optimizer(recipe, model, seed=0, steps_per_epoch=100)
    before = snapshot(model)
    batch = torch.randn(shape_of(recipe)), torch.randint(10, (2,))
    shares = (1.0, 1.0) if recipe.cram is None else recipe.cram.shares
    losses = train_on(
        batch, model, optimizer, config=recipe.train, objective=Objective(shares=shares)
    )
    assert all(loss > 0 for loss in losses if loss is not None)
    assert (losses[1] is None) == (recipe.cram is None)
    assert not same(before, snapshot(model))


ROWS = {
    "cifar10/resnet20": """
        sgd sgd-2x sam cram-k50 cram-multi cram-plus-k50 cram-plus-k70 cram-plus-multi
        cram-plus-multi-30-90 c-sam-k50 c-sam-k70 c-sam-multi topk-plus-k50 topk-plus-k70
        topk-plus-multi cram-plus-k50-dense-gradients cram-plus-multi-dense-gradients
        cram-plus-multi-uniform cram-plus-nm cram-plus-multi-tau20 cram-plus-multi-tau100
        cram-plus-4bits cram-plus-multi-finetune""",
    "cifar10/resnet18": "sgd sgd-2x sam cram-plus-k95",
    "cifar10/vgg16": "sgd cram-plus-k95",
    "cifar100/resnet18": "sgd sgd-2x sam cram-plus-multi",
    "cifar100/resnet20": "transfer",
    "imagenet/resnet50": """
        sgd sgd-2x sam cram-plus-k50 cram-plus-k70 cram-plus-multi cram-plus-nm cram-plus-4bits
        cram-plus-multi-finetune-10 cram-plus-multi-finetune-20""",
    "imagenet/resnet18": "sgd sam cram-plus-k50 cram-plus-k70 cram-plus-multi cram-plus-nm",
    "tiny-imagenet-200/resnet18-64": "sgd sgd-2x sam cram-plus-k50 cram-plus-multi cram-plus-nm",
    "tiny-imagenet-200/resnet50-64": "sgd sgd-2x sam cram-plus-multi",
    "digits/convnet-digits": "sgd cram-plus-multi",
    "flowers102/resnet50": "transfer",
    "oxford-iiit-pet/resnet50": "transfer",
    "dtd/resnet50": "transfer",
    "caltech101-64/resnet18-64": "transfer",
    "cifar10-jpeg/resnet18-64": "transfer",
    "digits/resnet18-64": "transfer",
}


@pytest.mark.parametrize("table", ROWS)
def test_the_rows_of_the_paper_are_there(table):
    assert {f"{table}/{method}" for method in ROWS[table].split()} <= EVERY.keys()


COMPARED = {  # methods with one training for each sparsity, in percent
    "cifar10/resnet20": ("gradual-magnitude dpf acdc str", (50, 70, 80, 90, 95)),
    "cifar10-jpeg/resnet20": ("gradual-magnitude dpf acdc str", (50, 70, 80, 90, 95)),
    "tiny-imagenet-200/resnet18-64": (
        "gradual-magnitude acdc str lottery-tickets gradual-obs",
        (80, 90),
    ),
    "squad/minilm-l6": (
        "gradual-magnitude movement soft-movement platon l0 gradual-obs",
        (50, 60, 70, 80),
    ),
}


@pytest.mark.parametrize("table", COMPARED)
def test_methods_to_compare_with_have_a_recipe_for_each_sparsity(table):
    methods, levels = COMPARED[table]
    for method in methods.split():
        for level in levels:
            recipe = ALL[f"{table}/{method}-k{level}"]
            assert recipe.method.name == method
            assert float(recipe.method.target.partition(":")[2]) == level / 100
            assert recipe.compress.to == (recipe.method.target,)
            assert recipe.title.endswith(f", trained for {level} %")


def test_titles_are_different_within_a_table():
    titles = [(recipe.task_name, recipe.architecture, recipe.title) for recipe in EVERY.values()]
    assert len(set(titles)) == len(titles)


def test_the_settings_of_the_paper():
    sgd, multi = EVERY[SGD20], EVERY[MULTI20]
    assert sgd.train == TrainConfig(200, 128, "bf16", 0.0)
    assert sgd.optimizer == OptimizerConfig("sgd", 0.1, 0.9, 5e-4, nesterov=False)
    assert sgd.schedule == ScheduleConfig("cosine", 5)
    assert sgd.compress.to == (*HIGH, "nm:2:4", "int4", "global:0.8+int4")
    assert multi == replace(
        sgd, name=MULTI20, title="CrAM+-Multi", cram=CramConfig("CrAM+", HIGH, rho=0.15)
    )
    assert EVERY["cifar10/resnet20/sam"].cram == CramConfig("SAM", rho=0.1)
    assert EVERY["cifar10/resnet20/sgd-2x"].train.epochs == 400
    k95 = EVERY["cifar10/vgg16/cram-plus-k95"]
    assert k95.cram == CramConfig("CrAM+", ("global:0.95",), rho=0.2)
    assert k95.train.epochs == 180
    assert "global:0.98" in k95.compress.to
    imagenet = EVERY["imagenet/resnet50/cram-plus-nm"]
    assert imagenet.train == TrainConfig(100, 512)
    assert imagenet.optimizer == OptimizerConfig(lr=0.2, weight_decay=1e-4)
    assert imagenet.cram.rho == 0.05
    assert imagenet.cram.operators == ("nm:2:4", "nm:4:8")


def test_the_other_cifar10_has_the_same_recipes():
    jpeg = {name for name in EVERY if name.startswith("cifar10-jpeg/")}
    ours = jpeg - {"cifar10-jpeg/resnet18-64/transfer"}
    assert ours == {
        name.replace("cifar10/", "cifar10-jpeg/") for name in EVERY if name.startswith("cifar10/")
    }
    for name in ours:
        twin = EVERY[name.replace("cifar10-jpeg/", "cifar10/")]
        data = replace(twin.data, name="cifar10-jpeg")
        assert EVERY[name] == replace(twin, name=name, data=data)


def test_every_multi_has_its_cheaper_forms_and_a_plain_training_of_its_cost():
    ends = ("/cram-plus-multi", "-multi-long", "/cram-plus-k95")
    multis = [name for name in ALL if name.endswith(ends)]
    assert len(multis) > 12
    for name in multis:
        whole, per_epoch = ALL[name], {"": 2, "-1.5x": 1.5, "-1x": 1}
        for form, passes in per_epoch.items():
            recipe = ALL[name + form]
            assert recipe.passes == passes * whole.train.epochs
            # different samples in the two passes: the ascent does not pay
            assert recipe.cram.rho == (None if form == "-1x" else whole.cram.rho)
            shares = {"dense_share": 1.0, "compressed_share": 1.0}
            cram = replace(recipe.cram, rho=whole.cram.rho, **shares)
            assert replace(recipe, name=name, title=whole.title, cram=cram) == whole
            assert recipe.title.startswith(whole.title.partition(",")[0])
            assert form == "" or {"-1.5x": ", 1.5x", "-1x": ", 1.0x"}[form] in recipe.title
        plain = name.rpartition("/")[0] + ("/adamw" if whole.optimizer.name == "adamw" else "/sgd")
        if whole.text is None:
            assert ALL[f"{plain}-2x"].passes == whole.passes
            assert ALL[plain].passes == ALL[f"{name}-1x"].passes


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        (["cram=null"], 10),
        (["cram.rule=CrAM"], 20),
        (["cram={rule: SAM, operators: []}"], 20),
        (["cram.rule=C-SAM"], 30),
        (["cram.rule=Top-K+"], 20),
        (["cram.dense_share=0.5", "cram.compressed_share=0.5"], 10),
        (["cram.compressed_share=0.5"], 15),
        (["cram.rule=C-SAM", "cram.dense_share=0.25", "cram.compressed_share=0.5"], 12.5),
        (["cram.base_step_probability=0.3"], 17),
        (["cram.base_step_probability=1", "cram.dense_share=0.5"], 5),
    ],
)
def test_the_passes_are_those_that_steps_take(changes, passes):
    recipe = load_recipe(MULTI20, ["train.epochs=10", "train.batch_size=8", *changes])
    assert recipe.passes == pytest.approx(passes)
    data = torch.randn(80, 3, 4, 4), torch.randint(10, (80,))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10))
    seen = 0

    def count(_module, inputs):
        nonlocal seen
        seen += len(inputs[0])

    model.register_forward_pre_hook(count)
    optimizer = build_optimizer(recipe, model, seed=0)
    shares = (1.0, 1.0) if recipe.cram is None else recipe.cram.shares
    for _ in range(recipe.train.epochs):
        for begin in range(0, 80, 8):
            batch = tuple(part[begin : begin + 8] for part in data)
            train_on(
                batch, model, optimizer, config=recipe.train, objective=Objective(shares=shares)
            )
    drawn = recipe.cram is not None and 0 < recipe.cram.base_step_probability < 1
    assert seen / 80 == pytest.approx(passes, rel=0.1 if drawn else 1e-9)


def test_what_early_stopping_holds_out_is_no_pass():
    recipe = load_recipe("squad/minilm-l6/adam", ["train.early_stopping={held_out: 0.2}"])
    assert recipe.passes == pytest.approx(1.6)


def test_no_recipe_has_changed():
    assert digests() == json.loads(FILE.read_text())  # `python tests/recipe_digests.py` writes them


def test_the_recipes_are_found_in_an_archive(monkeypatch, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(FAMILY20, "recipes/cifar10/resnet20.yaml")
    root = zipfile.Path(tmp_path / "a.zip", "recipes/")
    monkeypatch.setattr(module, "_packaged_recipes", lambda: module._recipes_below(root))
    assert recipe_names() == [name for name in ALL if re.match("cifar10(-jpeg)?/resnet20/", name)]
    assert load_recipe(MULTI20) == EVERY[MULTI20]


def test_a_recipe_is_in_one_file_of_the_package(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    shutil.copy(FAMILY20, tmp_path / "a" / "net.yaml")
    shutil.copy(FAMILY20, tmp_path / "b" / "net.yaml")
    said = r"^recipes/[ab]/net.yaml:(cifar10-jpeg/resnet20/\S+) is also recipes/[ab]/net.yaml:\1$"
    with pytest.raises(ValueError, match=said):
        module._recipes_below(tmp_path)


# files of the user's


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.yaml"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_file_extends_a_recipe_deep(write):
    path = write(
        f"extends: {MULTI20}\ncram: {{rho: 5e-2}}\noptimizer: {{lr: 1}}\ncompress: {{to: [int4]}}"
    )
    base = EVERY[MULTI20]
    assert load_recipe(path) == replace(
        base,
        name="cifar10/resnet20/mine",
        cram=replace(base.cram, rho=0.05),
        optimizer=replace(base.optimizer, lr=1.0),
        compress=CompressConfig(("int4",)),
    )
    assert load_recipe(str(path)) == load_recipe(path)


def test_a_section_can_be_taken_away(write):
    assert load_recipe(write(f"extends: {MULTI20}\ncram: null")).cram is None


def test_a_file_extends_another_beside_it(write):
    write(f"extends: {SGD20}\ntitle: Base\nname: a/b/c", "base.yml")
    write("extends: ../base.yml\ntrain: {epochs: 30}", "below/middle.yaml")
    top = load_recipe(write("extends: below/middle.yaml\ntrain: {batch_size: 7}", "top.yaml"))
    assert top.train == TrainConfig(30, 7)
    assert top.title == "Base"
    assert top.name == "cifar10/resnet20/top"


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("a b.yaml", "", "cifar10/resnet20/a-b"),
        ("_x.yaml", "", "cifar10/resnet20/x"),
        ("a.yaml", "name: x/y/z", "x/y/z"),
        ("a.yaml", "model: {name: torchvision/resnet50}", "cifar10/resnet50/a"),
        ("a.yaml", "data: {name: my images/}", "my-images/resnet20/a"),
    ],
)
def test_a_file_is_called_after_its_data_its_model_and_itself(write, file, text, name):
    recipe = load_recipe(write(f"extends: {SGD20}\n{text}", file))
    assert recipe.name == name
    assert load_recipe(write(dump(recipe.to_dict()), "again.yaml")) == recipe


def test_files_that_extend_each_other_are_refused(write):
    path = write("extends: two.yaml", "one.yaml")
    write("extends: ./one.yaml", "two.yaml")
    with pytest.raises(ValueError, match=r"one\.yaml extends itself"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the document is empty; allowed: a section"),
        ("- 1", r"the document is \[1\]; allowed: a section"),
        ("title: x", "data is missing; allowed: a section"),
        ("extends: 3", "extends: there is no recipe '3'; allowed: a name"),
        ("extends: cifar10/resnet20/sgb", r"extends: .*did you mean 'cifar10/resnet20/sgd'"),
        (f"extends: {SGD20}\ntrain: 3", "train is 3; allowed: a section with the keys epochs"),
        (f"extends: {SGD20}\ntrian: {{}}", r"trian is no known key \(did you mean 'train'\?\)"),
        (f"extends: {SGD20}\na: 1\na: 2", "'a' appears twice"),
        (f"extends: {SGD20}\nname: ../../x", r"name is '../../x'; allowed: <task>/<model>"),
        (f"extends: {SGD20}\ntitle: ' '", r"title is ' '"),
        ("extends: [", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_by_name(write, text, message):
    path = write(text)
    with pytest.raises(ValueError, match=message) as error:
        load_recipe(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match=r"a\.yaml is not UTF-8"):
        load_recipe(tmp_path / "a.yaml")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_recipe(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("name", ["cifar10/resnet20/cram-plus-mutli", "../recipe", "", "cifar10"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ValueError, match="torchcram list recipes") as error:
        load_recipe(name)
    assert repr(name) in str(error.value)
    assert (f"did you mean '{MULTI20}'" in str(error.value)) == name.startswith("cifar10/")


# families of the user's


FAMILY = f"""
base: {{extends: {SGD20}, train: {{epochs: 30}}, optimizer: {{lr: 0.5}}}}
methods:
  plain: {{title: Plain}}
  sparse: {{title: Sparse, train: {{epochs: 40}}, cram: {{operators: [int4], rho: 0.3}}}}
  sparser: {{from: sparse, title: Sparser, cram: {{operators: [int3]}}}}
variants:
  cifar100/wide: {{data: {{name: cifar100}}, train: {{epochs: 50, batch_size: 7}}}}
  a/b: {{methods: [plain], title: Not this}}
"""


def test_methods_change_the_base(write):
    path, sgd = write(FAMILY), EVERY[SGD20]
    optimizer = replace(sgd.optimizer, lr=0.5)
    plain = replace(
        sgd,
        name="cifar10/resnet20/plain",
        title="Plain",
        train=replace(sgd.train, epochs=30),
        optimizer=optimizer,
    )
    assert load_recipe(f"{path}:plain") == plain
    assert load_recipe(f"{path}:sparser") == replace(
        plain,
        name="cifar10/resnet20/sparser",
        title="Sparser",
        train=replace(sgd.train, epochs=40),
        cram=CramConfig(operators=("int3",), rho=0.3),
    )
    assert load_recipe(f"{path}:plain", ["data.name=x"]).name == "x/resnet20/plain"


def test_variants_change_the_base_and_methods_have_the_last_word(write):
    path = write(FAMILY)
    for method, epochs in (("plain", 50), ("sparse", 40), ("sparser", 40)):
        recipe, variant = load_recipe(f"{path}:{method}"), f"cifar100/wide/{method}"
        assert load_recipe(f"{path}:{variant}") == replace(
            recipe,
            name=variant,
            data=replace(recipe.data, name="cifar100"),
            train=replace(recipe.train, epochs=epochs, batch_size=7),
        )
    assert load_recipe(f"{path}:a/b/plain") == replace(
        load_recipe(f"{path}:plain"), name="a/b/plain"
    )


def test_a_file_extends_a_recipe_of_a_family(write):
    write(FAMILY, "family.yaml")
    recipe = load_recipe(write("extends: ./family.yaml:sparser\ntitle: Mine"))
    assert (recipe.name, recipe.title) == ("cifar10/resnet20/mine", "Mine")
    assert recipe.cram.operators == ("int3",)


def test_the_family_in_the_documentation_is_in_order(write):
    text = (Path(__file__).parents[3] / "docs" / "training.md").read_text("utf-8")
    path = write(re.search(r"```yaml\n(base:.*?)```", text, re.DOTALL)[1])
    assert load_recipe(f"{path}:plain").train.epochs == 10
    assert load_recipe(f"{path}:int4-short").train.epochs == 5
    assert load_recipe(f"{path}:digits/wide/int4").model.name.endswith("nets.py:mlp")
    assert load_recipe(f"{path}:cifar10/resnet20/int4").cram.operators == ("int4",)


def test_a_family_that_extends_itself_is_refused(write):
    path = write("base: {extends: mine.yaml:a}\nmethods: {a: {title: A}}")
    with pytest.raises(ValueError, match=r"mine\.yaml:a extends itself"):
        load_recipe(f"{path}:a")


def test_a_method_with_targets_is_one_per_target(write):
    path = write(
        """
        base: {extends: digits/convnet-digits/sgd}
        methods:
          dpf:
            title: DPF
            method: {name: dpf, args: {end: 50 %}}
            targets: [global:0.9, uniform:0.125, nm:2:4]
          longer: {from: dpf-k90, train: {epochs: 80}}
        """.replace("nm:2:4", "row:0.5")
    )
    recipe = load_recipe(f"{path}:dpf-k90")
    assert (recipe.method.target, recipe.compress.to) == ("global:0.9", ("global:0.9",))
    assert load_recipe(f"{path}:dpf-k12.5").method.target == "uniform:0.125"
    assert load_recipe(f"{path}:dpf-k50").method.target == "row:0.5"
    longer = load_recipe(f"{path}:longer")
    assert (longer.method, longer.train.epochs) == (recipe.method, 80)
    with pytest.raises(ValueError, match="dpf-k90"):
        load_recipe(f"{path}:dpf")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("[]", r"targets is \[\]; allowed: a list of operators"),
        ("global:0.9", "a list of operators"),
        ("[half]", r"targets\[0\] is 'half'"),
    ],
)
def test_targets_that_are_no_operators_are_refused(write, targets, message):
    path = write(f"base: {{}}\nmethods: {{a: {{method: {{name: dpf}}, targets: {targets}}}}}")
    with pytest.raises(ValueError, match=message):
        load_recipe(f"{path}:a-k90")


KEYS = "title, data, model, train, optimizer, schedule, compress, cram, text, task, method, lora"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: {}", "methods is missing"),
        ("base: {}\nmethods: {}", "methods is {}; allowed: at least one method"),
        ("methods: {a: {}}", "base is missing"),
        ("variants: {}", "base is missing"),
        ("base: {}\nmethods: {a: }", "methods.a is None; allowed: a section"),
        ("base: {}\nmethods: {a/b: {}}", "methods is 'a/b'; allowed: names without a slash"),
        ("base: {}\nmethods: {a: {}}\ntitle: x", "title is no known key; allowed: base, methods,"),
        (
            "base: {trian: 1}\nmethods: {a: {}}",
            rf"base.trian is no known key \(did you mean 'train'\?\); allowed: extends, {KEYS}$",
        ),
        (
            "base: {}\nmethods: {a: {name: a/b/c}}",
            rf"methods.a.name is no known key.*; allowed: from, targets, {KEYS}$",
        ),
        (
            "base: {}\nmethods: {a: {}}\nvariants: {a/b: {from: a}}",
            rf"variants.a/b.from is no known key; allowed: methods, {KEYS}$",
        ),
        ("base: {}\nmethods: {a: {from: 1}}", "methods.a.from is 1; allowed: the name of a method"),
        (
            "base: {}\nmethods: {sgd: {}, a: {from: sgb}}",
            r"methods.a.from is 'sgb' \(did you mean 'sgd'\?\); allowed: sgd, a$",
        ),
        ("base: {}\nmethods: {a: {from: a}}", "methods.a.from is 'a'; allowed: a method that does"),
        (
            "base: {}\nmethods: {a: {from: b}, b: {from: c}, c: {from: b}}",
            "methods.c.from is 'b'; allowed: a method that does not start from this one",
        ),
        (
            "base: {}\nmethods: {a: {}}\nvariants: {b: {}}",
            "variants is 'b'; allowed: names <task>/<model>",
        ),
        *(
            (
                f"base: {{}}\nmethods: {{a: {{}}}}\nvariants: {{b/c: {{methods: {methods}}}}}",
                message,
            )
            for methods, message in (
                ("a", "variants.b/c.methods is 'a'; allowed: a list of methods"),
                ("[]", r"variants.b/c.methods is \[\]; allowed: a list of methods"),
                ("[1]", "variants.b/c.methods is 1; allowed: names of methods"),
                ("[a, x]", "variants.b/c.methods is 'x'; allowed: a$"),
                ("[a, a]", r"variants.b/c.methods is \['a', 'a'\]; allowed: every method once"),
            )
        ),
    ],
)
def test_a_bad_family_is_refused_by_name(write, text, message):
    path = write(text)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: {message}"):
        load_recipe(f"{path}:a")


def test_a_recipe_of_a_family_is_named(write):
    path = write(FAMILY)
    names = "plain, sparse, sparser, cifar100/wide/plain, .*, a/b/plain$"
    with pytest.raises(ValueError, match=rf"has several recipes; allowed: .*yaml:NAME .* {names}"):
        load_recipe(path)
    with pytest.raises(ValueError, match=rf"no recipe 'plan' \(did you mean 'plain'\?\).* {names}"):
        load_recipe(f"{path}:plan")
    with pytest.raises(ValueError, match="has no recipe 'a/b/sparse'"):
        load_recipe(f"{path}:a/b/sparse")
    with pytest.raises(
        ValueError, match=r"other\.yaml:a: the file has no methods; allowed: .*yaml$"
    ):
        load_recipe(f"{write(f'extends: {SGD20}', 'other.yaml')}:a")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:plain, .*train.epochs is -1"):
        load_recipe(f"{path}:plain", ["train.epochs=-1"])


# overrides


def test_overrides_change_what_they_name():
    base = EVERY[MULTI20]
    found = load_recipe(MULTI20, ["cram.rho=1e-1", "train.epochs=7", "compress.to=[int4, nm:2:4]"])
    assert found == replace(
        base,
        cram=replace(base.cram, rho=0.1),
        train=replace(base.train, epochs=7),
        compress=CompressConfig(("int4", "nm:2:4")),
    )
    assert load_recipe(MULTI20, ["cram=null"]).cram is None


def test_an_override_makes_a_section_that_is_not_there():
    assert load_recipe(SGD20, ["cram.operators=[global:.50]"]).cram == CramConfig(
        operators=("global:0.5",)
    )
    assert load_recipe(SGD20, ["cram.rule=SAM", "cram.rho=2"]).cram == CramConfig("SAM", rho=2.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs=-1", "train.epochs is -1; allowed: at least 0"),
        (
            "train={epochs: 0, early_stopping: {}}",
            "train.epochs is 0; allowed: at least 1 with train.early_stopping",
        ),
        ("train.epochs=ten", "train.epochs is 'ten'; allowed: an integer"),
        ("train.epochs=true", "train.epochs is True; allowed: an integer"),
        ("train.epochs=4", "schedule.warmup_epochs is 5; allowed: at most train.epochs, which is"),
        ("train.epochs.x=4", "train.epochs is {'x': 4}; allowed: an integer"),
        ("train.batch_size=0", "train.batch_size is 0"),
        ("train.precision=fp16", "train.precision is 'fp16'.*; allowed: fp32, bf16"),
        ("train.label_smoothing=1", "train.label_smoothing is 1.0; allowed: from 0 to below 1"),
        ("data.augment=crop_flip", r"data.augment is 'crop_flip' \(did you mean 'crop-flip'\?\)"),
        ("data.augment=resized-crop-flip", "data.image_size is None; allowed: a size"),
        ("data.image_size=0", "data.image_size is 0"),
        ("data.name=", "data.name is None; allowed: a text"),
        ("data.name=''", "data.name is ''"),
        ("model.name=resnet21", r"model.name is 'resnet21' \(did you mean 'resnet20'\?\)"),
        ("model.name=torchvision/", "model.name is 'torchvision/'"),
        ("model.pretrained=true", "model.pretrained is True; allowed: false, as model.name is"),
        ("optimizer.name=adam", r"optimizer.name is 'adam' \(did you mean 'adamw'\?\)"),
        ("optimizer.lr=-1", "optimizer.lr is -1.0; allowed: at least 0"),
        ("optimizer.lr=1e999", "optimizer.lr is inf; allowed: a finite number"),
        ("optimizer.momentum=1", "optimizer.momentum is 1.0"),
        ("optimizer.weight_decay=-1e-4", "optimizer.weight_decay is -0.0001"),
        ("optimizer={momentum: 0, nesterov: true}", "optimizer.nesterov is True"),
        ("schedule.name=step", "schedule.name is 'step'; allowed: cosine, constant"),
        ("schedule.warmup_epochs=-1", "schedule.warmup_epochs is -1"),
        ("schedule.warmup_epochs=201", "schedule.warmup_epochs is 201"),
        ("compress.to=[]", r"compress.to is \[\]; allowed: at least one"),
        ("compress.to=int4", "compress.to is 'int4'; allowed: a list"),
        ("compress.to=[int4, int 4]", r"compress.to\[1\] is 'int 4': cannot read"),
        ("compress.to=[int4, global:0.3-0.9]", r"compress.to\[1\] is 'global:0.3-0.9'.* a range"),
        ("compress.to=[global:0.5, global:.5]", r"compress.to\[1\] is 'global:0.5'.* once"),
        ("compress.calibration_samples=0", "compress.calibration_samples is 0"),
        ("cram.rule=SAM", r"cram.operators is \['global:0.5'.*; allowed: \[\], as SAM does not"),
        ("cram.rule=cram+", r"cram.rule is 'cram\+'.*; allowed: SAM, CrAM, CrAM\+, C-SAM"),
        ("cram.operators=[]", r"cram.operators is \[\]; allowed: at least one"),
        ("cram.operators=[int9]", r"cram.operators\[0\] is 'int9': .*2 to 8"),
        ("cram.rho=-0.1", "cram.rho is -0.1"),
        ("cram.rho=.nan", "cram.rho is nan"),
        ("cram.mask_interval=0", "cram.mask_interval is 0"),
        ("cram.dense_share=0", "cram.dense_share is 0.0; allowed: above 0 and at most 1"),
        ("cram.compressed_share=1.5", "cram.compressed_share is 1.5"),
        ("cram.dense_share=0.001", "shares with a sample each in a train.batch_size of"),
        ("cram.base_step_probability=2", "cram.base_step_probability is 2.0"),
        ("cram.skip='('", r"cram.skip is '\(': .*; allowed: a regular expression, or null"),
        ("extends=x", "extends is no known key"),
        ("lr=3", r"lr is no known key \(did you mean 'optimizer.lr'\?\)"),
        ("train.patience=3", r"train.patience .* mean 'train.early_stopping.patience'\?\)"),
        ("skip=a", r"skip is no known key \(did you mean 'cram.skip' or 'method.skip'\?\)"),
        ("name=sgd", "name is 'sgd'; allowed: <task>/<model>/<method>"),
    ],
)
def test_a_bad_value_is_refused(override, message):
    with pytest.raises(ValueError, match=message) as error:
        load_recipe(MULTI20, [override])
    found = str(error.value)
    assert found.startswith("recipes/cifar10/resnet20.yaml:cram-plus-multi, with ")
    assert re.search(rf", with {re.escape(override)}: ", found)


def test_the_same_values_are_refused_without_a_file():
    with pytest.raises(ValueError, match=r"^epochs is -1; allowed: at least 0$"):
        TrainConfig(epochs=-1, batch_size=1)


def test_a_method_needs_an_epoch():
    changes = ["train.epochs=0", "schedule.warmup_epochs=0"]
    with pytest.raises(ValueError, match="epochs is 0; allowed: at least 1, as dpf trains"):
        load_recipe("cifar10/resnet20/dpf-k90", changes)


@pytest.mark.parametrize("value", ['!!timestamp "x"', "!!bool maybe"])
def test_a_value_that_is_not_what_its_tag_says_is_named_with_file_and_line(tmp_path, value):
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: digits/convnet-digits/sgd\ntrain:\n  epochs: {value}\n")
    with pytest.raises(ValueError, match=r"mine\.yaml is not YAML: line 3, column 11") as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path} is not YAML: ")


def test_the_folder_of_a_language_model_is_relative_to_the_recipe(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "mine.yaml"
    path.write_text("extends: sst2/minilm-l6/adam\nmodel: {name: ./tiny}\n")
    assert load_recipe(path).model.name == str(tmp_path / "sub" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert load_recipe(path, ["model.name=../other.gguf"]).model.name == str(
        tmp_path.parent / "other.gguf"
    )
    assert load_recipe("sst2/minilm-l6/adam").model.name == "minilm-l6"
