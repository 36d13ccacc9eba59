import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import CPU, Stop, digits, recipe, reseal, run, stop_after, weights
from torch.nn import functional

from torchcram import GlobalTopK, compress_, sparsity
from torchcram.experiments.data.images import ImageDataset, Images
from torchcram.experiments.evaluation.compressed_models import one_shot
from torchcram.experiments.models import ConvNet
from torchcram.experiments.recipe.build import build_initial_model
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.run_folder import read_run
from torchcram.experiments.training.schedule import lr_at
from torchcram.experiments.training.trainer import Start, load_trained


def brighter(data):
    """As many images of the same classes, but other ones."""
    parts = [replace(part, images=part.images + 9) for part in (data.train, data.test)]
    return ImageDataset(data.name, *parts, data.classes)


STEPS = 5  # of an epoch: 320 images in batches of 64

VARIANTS = {
    "SGD": recipe(method="sgd"),
    "AdamW": recipe("optimizer.name=adamw", "optimizer.lr=0.001", method="sgd"),
    "CrAM+-Multi": recipe(),
    "CrAM+-Multi with AdamW": recipe("optimizer.name=adamw", "optimizer.lr=0.001"),
    "C-SAM": recipe("cram.rule=C-SAM"),
    "masks kept": recipe("cram.mask_interval=3", "cram.operators=[global:0.5, global:0.3-0.9]"),
    "half a batch each": recipe("cram.dense_share=0.5", "cram.compressed_share=0.5"),
    "some plain steps": recipe("cram.base_step_probability=0.4", "schedule.warmup_epochs=1"),
}


@pytest.fixture(scope="module")
def data():
    return digits()


def test_the_loss_falls_and_the_folder_tells_what_happened(tmp_path, data):
    heard = []
    given = recipe("optimizer.lr=0.2", "train.batch_size=16", epochs=6)
    found = run(tmp_path / "run", given, data, progress=lambda *news: heard.append(news))
    records = read_log(tmp_path / "run")
    assert [record.epoch for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[-1].loss < records[0].loss / 2
    assert records[-1].compressed_loss < records[0].compressed_loss
    assert records[-1].accuracy == found.finished.accuracy > 0.6  # chance is 0.1
    assert found.finished.seconds == pytest.approx(sum(record.seconds for record in records))
    assert all(0 < record.mask_change < 0.5 for record in records)
    assert records[-1].mask_change < records[0].mask_change
    steps = 320 // 16
    assert [record.lr for record in records] == [
        lr_at(record.epoch * steps - 1, steps, given.schedule, lr=0.2, epochs=6)
        for record in records
    ]
    assert heard[0] == (0, 6, None)
    assert [news for news in heard if news[2] is not None] == [(r.epoch, 6, r) for r in records]
    assert read_run(tmp_path / "run") == (given, found.info)
    assert found.info.machine
    assert found.info.versions["torch"] in torch.__version__
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "epoch-0005.pt",
        "epoch-0006.pt",
    ]


def test_plain_training_has_no_compressed_loss(tmp_path, data):
    run(tmp_path, recipe(method="sgd", epochs=1), data)
    (record,) = read_log(tmp_path)
    assert record.compressed_loss is None
    assert record.mask_change > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_resuming_gives_the_weights_of_a_run_that_was_never_stopped(tmp_path, data, name):
    given = VARIANTS[name]
    run(tmp_path / "whole", given, data)
    for steps in (STEPS + 2, STEPS + 1):  # in the second epoch, then in the third
        with pytest.raises(Stop):
            run(tmp_path / "stopped", given, data, make_step=stop_after(steps))
    found = run(tmp_path / "stopped", given, data)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    whole, stopped = (read_log(tmp_path / name) for name in ("whole", "stopped"))
    for one, other in zip(whole, stopped, strict=True):
        assert (one.loss, one.compressed_loss, one.accuracy, one.lr, one.mask_change) == (
            other.loss,
            other.compressed_loss,
            other.accuracy,
            other.lr,
            other.mask_change,
        )
    assert found.finished.seconds == pytest.approx(sum(record.seconds for record in stopped))


class WithDropout(ConvNet):
    def forward(self, x):
        x = functional.dropout(self.features(x).mean((2, 3)), 0.5, self.training)
        return self.fc(x)


def test_dropout_continues_where_it_was(tmp_path, data):
    torch.manual_seed(3)
    start = Start(WithDropout((12, 24, 48)))
    run(tmp_path / "whole", recipe(), data, start=start)
    torch.rand(5)
    with pytest.raises(Stop):
        run(tmp_path / "stopped", recipe(), data, start=start, make_step=stop_after(7))
    run(tmp_path / "stopped", recipe(), data, start=start)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


def test_a_run_stopped_at_any_write_continues_exactly(tmp_path, data, monkeypatch):
    given = recipe(method="sgd", epochs=2)
    run(tmp_path / "whole", given, data)
    real, left = os.fsync, 0

    def fsync(number):
        nonlocal left
        left -= 1
        if left == 0:
            raise Stop
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    stops = 0
    for writes in range(1, 50):
        folder, left = tmp_path / str(writes), writes
        with suppress(Stop):
            run(folder, given, data)
            break
        stops += 1
        run(folder, given, data)
        assert weights(folder) == weights(tmp_path / "whole"), f"stopped at write {writes}"
        assert [record.epoch for record in read_log(folder)] == [1, 2]
    # recipe, run, log, two checkpoints, model, run: a file and its folder; the log at checkpoints
    assert stops == 2 * 7 + 2


CHILD = """
import sys, time
from pathlib import Path
from runs import digits, recipe, run
from torchcram.experiments.training.steps import EagerStep
class Slow(EagerStep):
    def run(self):
        time.sleep(0.02)
        super().run()
run(Path(sys.argv[1]), recipe(epochs=8), digits(), make_step=Slow)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_a_killed_process_loses_the_current_epoch_at_most(tmp_path, data):
    folder, given = tmp_path / "killed", recipe(epochs=8)
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)], env={**os.environ, "PYTHONPATH": paths}
    )
    try:
        run(tmp_path / "whole", given, data)
        late = time.monotonic() + 60
        while not (folder / "checkpoints" / "epoch-0002.pt").exists():
            assert child.poll() is None, "the training ended too early"
            assert time.monotonic() < late, "the training does not get anywhere"
            time.sleep(0.001)
        moment = random.uniform(0, 0.3)  # noqa: S311
        time.sleep(moment)
    finally:
        os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    heard = []
    run(folder, given, data, progress=lambda *news: heard.append(news))
    assert heard[0][0] >= 2
    assert weights(folder) == weights(tmp_path / "whole"), f"killed after {moment} s"


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, data):
    given = recipe()
    run(tmp_path / "whole", given, data)
    folder = tmp_path / "damaged"
    with pytest.raises(Stop):
        run(folder, given, data, make_step=stop_after(2 * STEPS))
    newest = folder / "checkpoints" / "epoch-0002.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    heard = []
    with pytest.warns(UserWarning, match=r"epoch-0002\.pt is not used: it is cut off"):
        run(folder, given, data, progress=lambda *news: heard.append(news))
    assert heard[0] == (1, 3, None)
    assert weights(folder) == weights(tmp_path / "whole")
    assert [record.epoch for record in read_log(folder)] == [1, 2, 3]


def without(name):
    def change(content):
        del content["state"]["training"][name]

    return change


def put(value, *keys):
    def change(content):
        *above, last = keys
        for key in above:
            content = content[key]
        content[last] = value

    return change


def another_model(content):
    model = content["state"]["training"]["model"]
    model["fc.weight"] = model["fc.weight"][:5]


def fewer_weights(content):
    del content["state"]["training"]["model"]["fc.bias"]


TRAINING = ("state", "training")
WRONG = {  # sealed with the right digest
    "no state": put({}, "state"),
    "no training": put(None, *TRAINING),
    "no seconds": put("long", "state", "seconds"),
    "infinite seconds": put(math.inf, "state", "seconds"),
    "no model": without("model"),
    "no optimizer": without("optimizer"),
    "no generators": without("random"),
    "another model": another_model,
    "fewer weights": fewer_weights,
    "another weight": put(torch.ones(2), *TRAINING, "model", "more"),
    "no tensor": put("text", *TRAINING, "model", "fc.bias"),
    "another dtype": put(torch.ones(10, dtype=torch.int64), *TRAINING, "model", "fc.bias"),
    "no moments": put({0: {}}, *TRAINING, "optimizer", "state"),
    "moments of another shape": put(
        torch.ones(7), *TRAINING, "optimizer", "state", 0, "momentum_buffer"
    ),
    "moments that are none": put("text", *TRAINING, "optimizer", "state", 0, "momentum_buffer"),
    "a parameter too many": put({}, *TRAINING, "optimizer", "state", 99),
    "moments of nobody": put({}, *TRAINING, "optimizer", "state"),
    "moments of nothing": put([], *TRAINING, "optimizer", "state"),
    "no draws": put(None, *TRAINING, "optimizer", "cram"),
    "draws of junk": put({"masks": 3}, *TRAINING, "optimizer", "cram"),
    "a generator of junk": put(
        torch.ones(3, dtype=torch.uint8), *TRAINING, "optimizer", "cram", "generator"
    ),
    "random numbers of junk": put(torch.ones(3, dtype=torch.uint8), *TRAINING, "random", "cpu"),
    "a tensor for an epoch": put(torch.ones(2), "epoch"),
    "a tensor for an identity": put({"seed": torch.ones(2)}, "identity"),
    "numbers for keys": put({1: 2}, "identity"),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, data):
    """A run with two checkpoints, only ever copied, and the weights that it is to come to."""
    folder = tmp_path_factory.mktemp("content")
    run(folder / "whole", recipe(), data)
    with pytest.raises(Stop):
        run(folder / "stopped", recipe(), data, make_step=stop_after(2 * STEPS))
    return folder / "stopped", weights(folder / "whole")


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_content_with_the_right_digest_is_named_once_and_the_one_before_used(
    tmp_path, data, stopped, wrong
):
    folder = shutil.copytree(stopped[0], tmp_path / "run")
    reseal(folder / "checkpoints" / "epoch-0002.pt", WRONG[wrong])
    heard = []
    with pytest.warns(UserWarning, match=r"epoch-0002\.pt is not used: ") as told:
        run(folder, recipe(), data, progress=lambda *news: heard.append(news))
    assert len(told) == 1
    assert heard[0] == (1, 3, None)
    assert weights(folder) == stopped[1]
    assert [record.epoch for record in read_log(folder)] == [1, 2, 3]


def test_without_a_checkpoint_that_fits_training_begins_anew(tmp_path, data, stopped):
    folder = shutil.copytree(stopped[0], tmp_path / "run")
    reseal(folder / "checkpoints" / "epoch-0001.pt", WRONG["fewer weights"])
    reseal(folder / "checkpoints" / "epoch-0002.pt", WRONG["draws of junk"])
    heard = []
    with pytest.warns(UserWarning, match="is not used") as told:
        run(folder, recipe(), data, progress=lambda *news: heard.append(news))
    assert [str(one.message).partition(" is not used")[0][-5:] for one in told] == [
        "02.pt",
        "01.pt",
    ]
    assert heard[0] == (0, 3, None)
    assert weights(folder) == stopped[1]


def test_the_warning_says_what_does_not_fit(tmp_path, data, stopped):
    folder = shutil.copytree(stopped[0], tmp_path / "run")
    path = folder / "checkpoints" / "epoch-0002.pt"
    reseal(path, WRONG["another model"])
    with pytest.warns(UserWarning, match="not used") as told:
        run(folder, recipe(), data)
    assert str(told[0].message) == (
        f"{path} is not used: its 'fc.weight' is float32 of shape (5, 48); expected: float32 of "
        "shape (10, 48)"
    )


def test_a_full_device_is_no_wrong_content(tmp_path, data, stopped, monkeypatch):
    folder = shutil.copytree(stopped[0], tmp_path / "run")

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ConvNet, "load_state_dict", full)
    with pytest.raises(torch.OutOfMemoryError):
        run(folder, recipe(), data)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_the_log_is_on_the_disk_before_the_checkpoint(tmp_path, data, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(number):
        synced.append(str(Path(f"/proc/self/fd/{number}").readlink()))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    run(tmp_path, recipe(epochs=2), data)
    log = str(tmp_path / "log.jsonl")
    first, second = (
        next(at for at, path in enumerate(synced) if name in path)
        for name in ("epoch-0001.pt", "epoch-0002.pt")
    )
    assert log in synced[:first]
    assert log in synced[first:second]


def test_a_finished_run_is_not_touched(tmp_path, data):
    one = run(tmp_path, recipe(epochs=1), data)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*") if path.is_file()}
    again = run(tmp_path, recipe(epochs=1), data, make_step=stop_after(0))
    assert again.info == one.info
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])
    changed = {path.name for path, when in before.items() if path.stat().st_mtime_ns != when}
    assert changed <= {"recipe.yaml", ".lock"}


def test_a_finished_run_whose_model_is_gone_makes_it_again(tmp_path, data):
    run(tmp_path, recipe(epochs=1), data)
    before = weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="not finished"):
        load_trained(tmp_path, CPU)
    run(tmp_path, recipe(epochs=1), data, make_step=stop_after(0))
    assert weights(tmp_path) == before


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"given": recipe("cram.rho=0.2", epochs=1)}, ["recipe.cram.rho is 0.1, not 0.2"]),
        ({"given": recipe(epochs=2)}, ["recipe.train.epochs is 1, not 2"]),
        (
            {"given": recipe(method="sgd", epochs=1)},
            ["holds another run, of the recipe digits/convnet-digits/cram-plus-multi; choose"],
        ),
        ({"seed": 5}, ["seed is 0, not 5"]),
        ({"data": digits(test=50)}, ["data.test_images is 100, not 50"]),
        ({"data": brighter(digits())}, ["data.mean is [0."]),
        ({"start": Start(ConvNet((12, 24, 48)))}, ["start is None, not "]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_folder_of_another_run_is_refused_and_left_alone(tmp_path, data, other, said):
    run(tmp_path, recipe(epochs=1), data)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    options = {"given": recipe(epochs=1), "data": data, **other}
    with pytest.raises(ValueError, match="holds another run") as caught:
        run(tmp_path, **options)
    assert all(text in str(caught.value) for text in said)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("model.name=resnet20", "'resnet20' does not take the images of 'digits', 1x8x8: "),
        ("model.name=torchvision/vit_b_16", "'torchvision/vit_b_16' does not take the images"),
        ("cram.only=nothing", "matches no compressible weight"),
    ],
)
def test_what_cannot_begin_does_not_block_the_folder(tmp_path, data, wrong, said):
    with pytest.raises(ValueError, match=said):
        run(tmp_path, recipe(wrong, epochs=1), data)
    found = run(tmp_path, recipe(epochs=1), data)
    assert found.recipe == recipe(epochs=1)
    assert [record.epoch for record in read_log(tmp_path)] == [1]


def test_an_epoch_that_was_saved_is_not_given_up_for_another_run(tmp_path, data):
    with pytest.raises(Stop):
        run(tmp_path, recipe(), data, make_step=stop_after(STEPS))
    with pytest.raises(ValueError, match="holds another run: seed is 0, not 1"):
        run(tmp_path, recipe(), data, seed=1)


def test_classes_may_have_any_names(tmp_path, data):
    odd = replace(data, classes=("caf\udce9", "é", *data.classes[2:]))
    run(tmp_path, recipe(epochs=1), odd)
    assert run(tmp_path, recipe(epochs=1), odd).info.data.classes == odd.classes


def test_targets_and_title_may_change(tmp_path, data):
    run(tmp_path, recipe(epochs=1), data)
    other = recipe("compress.to=[int4]", "title=another", epochs=1)
    found = run(tmp_path, other, data, make_step=stop_after(0))
    assert found.recipe == other


@pytest.mark.parametrize("name", ["log.jsonl", "checkpoints", "model.safetensors"])
def test_a_folder_of_something_else_is_refused(tmp_path, data, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"it has {name} but no run.json"):
        run(tmp_path, recipe(), data)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "the document is"),
        ('{"seed": "0"}', "seed is '0'"),
        ("wrong versions", "versions is 7"),
    ],
)
def test_a_damaged_description_is_named(tmp_path, data, content, said):
    run(tmp_path, recipe(epochs=1), data)
    if content == "wrong versions":
        content = json.dumps({**json.loads((tmp_path / "run.json").read_text()), "versions": 7})
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json.*" + said):
        load_trained(tmp_path, CPU)


def test_two_processes_do_not_share_a_folder(tmp_path, data):
    pytest.importorskip("fcntl")

    def second(*_):
        with pytest.raises(ValueError, match="another process is working in this folder"):
            run(tmp_path, recipe(epochs=1), data)
        raise Stop

    with pytest.raises(Stop):
        run(tmp_path, recipe(epochs=1), data, progress=second)


def test_intervals(tmp_path, data):
    saved = []
    run(
        tmp_path,
        recipe(method="sgd", epochs=5),
        data,
        eval_interval=2,
        checkpoint_interval=3,
        progress=lambda *_: saved.append({p.name for p in tmp_path.glob("checkpoints/*.pt")}),
    )
    assert [record.accuracy is not None for record in read_log(tmp_path)] == [0, 1, 0, 1, 1]
    assert saved[-1] == {"epoch-0003.pt", "epoch-0005.pt"}
    for name in ("eval_interval", "checkpoint_interval"):
        with pytest.raises(ValueError, match=f"{name}=0: at least 1 is allowed"):
            run(tmp_path, recipe(method="sgd", epochs=5), data, **{name: 0})


def test_resuming_with_rare_checkpoints(tmp_path, data):
    given = recipe()
    run(tmp_path / "whole", given, data)
    with pytest.raises(Stop):
        run(
            tmp_path / "rare",
            given,
            data,
            checkpoint_interval=2,
            make_step=stop_after(2 * STEPS + 2),
        )
    with pytest.raises(Stop):  # nothing was saved at all
        run(tmp_path / "none", given, data, checkpoint_interval=9, make_step=stop_after(STEPS))
    for name in ("rare", "none"):
        run(tmp_path / name, given, data)
        assert weights(tmp_path / name) == weights(tmp_path / "whole")
        assert [record.epoch for record in read_log(tmp_path / name)] == [1, 2, 3]


def test_seeds_differ_and_global_generators_are_left_alone(tmp_path, data):
    given = recipe(epochs=1)
    state = torch.get_rng_state()
    run(tmp_path / "0", given, data)
    run(tmp_path / "1", given, data, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert weights(tmp_path / "0") != weights(tmp_path / "1")
    torch.rand(100)
    run(tmp_path / "again", given, data)
    assert weights(tmp_path / "0") == weights(tmp_path / "again")


def test_a_start_is_copied_and_its_masks_are_held(tmp_path, data):
    given = recipe(epochs=2)
    model = build_initial_model(given, classes=10, seed=7)
    masks = compress_(model, GlobalTopK(0.8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start = Start(model, masks)
    run(tmp_path / "whole", given, data, start=start)
    with pytest.raises(Stop):
        run(tmp_path / "stopped", given, data, start=start, make_step=stop_after(STEPS + 1))
    run(tmp_path / "stopped", given, data, start=start)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    trained = dict(load_trained(tmp_path / "whole", CPU).model.named_parameters())
    assert sparsity({name: trained[name] for name in masks}) == pytest.approx(0.8, abs=1e-3)
    for name, mask in masks.items():
        assert bool((trained[name][~mask] == 0).all())
        assert not torch.equal(trained[name], before[name])
    with pytest.raises(ValueError, match="start is "):
        run(tmp_path / "whole", given, data, start=Start(model))


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, data):
    given = recipe("optimizer.lr=1e30", "optimizer.momentum=0", method="sgd", epochs=2)
    said = r"epoch 1: the training loss is .*; a smaller learning rate or rho may help, in another"
    with pytest.raises(FloatingPointError, match=said):
        run(tmp_path, given, data)
    assert not (tmp_path / "model.safetensors").exists()
    assert read_log(tmp_path) == []
    assert list(tmp_path.glob("checkpoints/*")) == []


def test_a_model_file_of_another_model_is_refused(tmp_path, data):
    run(tmp_path, recipe(epochs=1), data)
    (tmp_path / "model.safetensors").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or no safetensors file"):
        load_trained(tmp_path, CPU)


def test_an_unfinished_or_missing_run_cannot_be_loaded(tmp_path, data):
    with pytest.raises(ValueError, match=r"not the folder of a run: it has no run\.json"):
        load_trained(tmp_path, CPU)
    with pytest.raises(Stop):
        run(tmp_path, recipe(), data, make_step=stop_after(1))
    with pytest.raises(ValueError, match="the training is not finished"):
        load_trained(tmp_path, CPU)


@pytest.mark.parametrize(
    ("train", "classes"), [(320, 1), (3, 10), (1, 1)], ids=["one class", "few images", "one image"]
)
@pytest.mark.parametrize("method", ["sgd", "cram-plus-multi"])
def test_odd_data(tmp_path, train, classes, method):
    found = digits(train=train)
    parts = [Images(part.images, part.labels % classes) for part in (found.train, found.test)]
    data = ImageDataset("digits", *parts, tuple(map(str, range(classes))))
    given = recipe(method=method, epochs=2)
    trained = run(tmp_path, given, data)
    assert 0 <= trained.finished.accuracy <= 1
    (target, *_) = one_shot(trained.model, given, data, ["global:0.5"], device=CPU, seed=0)
    assert 0 <= target.after <= 1
