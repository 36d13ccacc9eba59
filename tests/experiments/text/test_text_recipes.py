import re
from pathlib import Path

import pytest

from torchcram.experiments.recipe import Recipe, ScheduleConfig, load_recipe, recipe_names
from torchcram.experiments.training.schedule import lr_at

EVERY = {name: one for name in recipe_names() if (one := load_recipe(name)).text is not None}
LEVELS = tuple(f"uniform:0.{level}" for level in (5, 6, 7, 8))
PLAIN = "squad/minilm-l6/adam"


@pytest.mark.parametrize("name", EVERY)
def test_every_recipe_is_in_order(name):
    recipe = EVERY[name]
    assert recipe.name == name
    assert recipe.task_name == recipe.data.name == recipe.text.task
    assert recipe.model.name.endswith(recipe.architecture)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert recipe.model.freeze == r"\.embeddings\."
    assert recipe.compress.only == r"\.encoder\."
    if recipe.method is not None:
        assert recipe.compress.to == (recipe.method.target,)
        assert recipe.method.only == recipe.compress.only
        return
    assert recipe.compress.to == (*LEVELS, "nm:2:4", "int8", "int4")
    assert recipe.compress.watch in recipe.compress.to
    assert (recipe.cram is None and recipe.method is None) == (
        recipe.method_name in ("adam", "adam-long")
    )
    if recipe.cram is not None:
        assert recipe.title.startswith(recipe.cram.rule)
        assert recipe.cram.only == (recipe.compress.only if recipe.cram.operators else None)


SETTINGS = {  # epochs, label smoothing, rho, operators, p(Adam)
    "adam": (2, 0.1, None, None, None),
    "sam": (2, 0.1, 0.01, (), 0),
    **{f"cram-plus-k{k}0": (3, 0.2, 0.005, (f"uniform:0.{k}",), 0) for k in (5, 6, 7, 8)},
    "cram-plus-multi": (3, 0.2, 0.005, LEVELS, 0),
    **{f"cram-plus-multi-adam{p}0": (3, 0.2, 0.005, LEVELS, p / 10) for p in (1, 3, 5, 8)},
}


@pytest.mark.parametrize("model", ["minilm-l6", "bert-base-uncased"])
@pytest.mark.parametrize("method", SETTINGS)
def test_squad_is_trained_as_the_paper_does(model, method):
    recipe = EVERY[f"squad/{model}/{method}"]
    cram = recipe.cram
    found = (None,) * 3 if cram is None else (cram.rho, cram.operators, cram.base_step_probability)
    assert (recipe.train.epochs, recipe.train.label_smoothing, *found) == SETTINGS[method]
    assert (recipe.train.batch_size, recipe.text.length, recipe.text.stride) == (16, 384, 128)
    optimizer = recipe.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("adamw", 8e-5, 0)
    assert (recipe.schedule.name, recipe.schedule.warmup_epochs) == ("linear", 0)


def test_the_learning_rate_goes_down_a_line():
    def rates(warmup):
        config = ScheduleConfig("linear", warmup)
        return [lr_at(step, 4, config, lr=8.0, epochs=2) for step in range(8)]

    assert rates(0) == [8, 7, 6, 5, 4, 3, 2, 1]
    assert rates(1) == [2, 4, 6, 8, 8, 6, 4, 2]


def test_what_there_is_of_glue():
    assert {name for name in EVERY if not name.startswith("squad/")} == {
        f"{task}/minilm-l6/{method}"
        for task in ("sst2", "mrpc", "rte", "cola")
        for method in (
            *("adam", "sam", "cram-plus-multi", "cram-plus-multi-1.5x", "cram-plus-multi-1x"),
        )
    }


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.name=resnet20", "model.name is 'resnet20'; allowed: a model for language"),
        ("text=null", "model.name is 'minilm-l6'; allowed: a model for images"),
        ("data.augment=shift", "data.augment is 'shift'; allowed: none"),
        ("data.image_size=8", "data.image_size is 8; allowed: null"),
        ("data.color=true", "data.color is True; allowed: false"),
        ("text.task=sqad", "text.task is 'sqad' (did you mean 'squad'?)"),
        ("text.length=8", "text.length is 8; allowed: at least 16"),
        ("text.stride=129", "text.stride is 129; allowed: from 0 to 128, a third of length"),
        ("text.words=3", "text.words is no known key"),
        ("model.freeze=(", "model.freeze is '('"),
        ("compress.only='['", "compress.only is '['"),
        ("compress.watch=uniform:2", "compress.watch is 'uniform:2': "),
        ("compress.watch=uniform:0.1-0.5", "allowed: one sparsity, or null"),
        ("model.name=minilm", "model.name is 'minilm' (did you mean 'minilm-l6'?)"),
    ],
)
def test_bad_values_are_named(override, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        load_recipe(PLAIN, ["model.pretrained=false", override])


@pytest.mark.parametrize("name", ["./minilm", "/a/b", "~/x", "../y", "transformers/a/b"])
def test_folders_and_names_of_the_hub_are_models(name):
    stored = load_recipe(PLAIN, [f"model.name={name}"]).model.name
    relative = name.startswith((".", "~"))
    assert stored == (str(Path(name).expanduser().resolve()) if relative else name)


@pytest.mark.parametrize("name", [PLAIN, "wiki-paragraphs/smollm2-135m/adamw"])
def test_texts_are_not_loaded_without_a_folder(name):
    recipe = load_recipe(name)
    message = f"dataset '{recipe.data.name}' needs the folder that the data lies in"
    with pytest.raises(ValueError, match=message):
        recipe.build_task().load(None)


@pytest.mark.parametrize(
    ("name", "lr"), [(PLAIN, 5e-5), ("wiki-paragraphs/smollm2-135m/adamw", 0.25)]
)
def test_texts_are_finetuned_for_at_most_two_epochs(name, lr):
    task = load_recipe(name).build_task()
    for epochs in (1, 2, 10):
        defaults = task.finetuning(epochs, 0.25)
        assert (defaults.epochs, defaults.lr) == (min(2, epochs), lr)
        assert defaults.early_stopping
