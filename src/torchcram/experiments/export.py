"""Export: a finished run is compressed to many targets, each written as a file to deploy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchcram import artifact
from torchcram.artifact.writer import find_tables, round_as_saved_, round_tables
from torchcram.experiments.evaluation.compressed_models import compressed_models, score_on_test
from torchcram.experiments.io.files import (
    folder_written_aside,
    name_file_in_errors,
    remove_leftovers,
    slug,
)
from torchcram.experiments.io.weights import save_model
from torchcram.experiments.models.causal import CausalModel, find_gguf_source
from torchcram.experiments.recipe.build import build_batches, target_weights
from torchcram.experiments.recipe.overrides import with_targets
from torchcram.experiments.results_store import as_result, require_same_data
from torchcram.integrations import gguf
from torchcram.integrations.compressed_tensors import check_layers, read_quantizer
from torchcram.pruners import parse_pruner

if TYPE_CHECKING:
    from torch import nn

    from torchcram.experiments.evaluation.results import Result, TargetResult
    from torchcram.experiments.tasks import Dataset
    from torchcram.experiments.training.trainer import Trained

ENDINGS = {  # file name endings by format
    "torchcram": ".torchcram.safetensors",
    "safetensors": ".safetensors",
    "transformers": "",
    "compressed-tensors": ".compressed-tensors",
    "onnx": ".onnx",
    "gguf": ".gguf",  # after the type of the weights
}
FORMATS = tuple(ENDINGS)
FOLDERS = ("transformers", "compressed-tensors")  # formats that `from_pretrained` loads
VALUES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SAMPLES = 4  # number of samples on which an ONNX file is compared with the model


@dataclass(frozen=True)
class Exported:
    """A compressed model that was written.

    Attributes:
        path: Path of the file or folder.
        size: Size in bytes.
        target: Scores of the model.
    """

    path: Path
    size: int
    target: TargetResult


def check_options(
    kind: str,
    values: str | None,
    embeddings: str | None,
    targets: Sequence[str] = (),
    gguf_type: str | None = None,
) -> None:
    """Raises ValueError for options of `export` that do not exist or do not go together.

    Args:
        kind: Format.
        values: Type that weights are rounded to unless they are quantized.
        embeddings: Quantizer of the tables of embeddings.
        targets: Operators as text.
        gguf_type: Type of the weights in GGUF files.

    Raises:
        ValueError: If an option is not allowed; the message names what is.
    """
    if kind not in FORMATS:
        raise ValueError(f"--format {kind}: allowed are {', '.join(FORMATS)}")
    if values is not None and values not in VALUES:
        raise ValueError(f"--values {values}: allowed are {', '.join(VALUES)}")
    for option, value in (("values", values), ("embeddings", embeddings)):
        if value is not None and kind != "torchcram":
            raise ValueError(f"--{option} {value}: allowed only with --format torchcram")
    if gguf_type is not None and kind != "gguf":
        raise ValueError(f"--gguf-type {gguf_type}: allowed only with --format gguf")
    if gguf_type is not None and gguf_type not in gguf.TYPES:
        raise ValueError(f"--gguf-type {gguf_type}: allowed are {', '.join(gguf.TYPES)}")
    for target in targets:
        if kind == "compressed-tensors":
            read_quantizer(target)
        if kind == "gguf":
            gguf.choose_type(target, gguf_type)


def check_export(
    trained: Trained,
    kind: str,
    values: str | None,
    embeddings: str | None = None,
    targets: Sequence[str] = (),
    gguf_type: str | None = None,
) -> None:
    """Raises ValueError for an export that is not possible, before anything is computed.

    Args:
        trained: Finished training.
        kind: Format.
        values: Type that weights are rounded to unless they are quantized.
        embeddings: Quantizer of the tables of embeddings.
        targets: Operators as text.
        gguf_type: Type of the weights in GGUF files.

    Raises:
        ValueError: If it is not possible; the message names what is allowed.
    """
    check_options(kind, values, embeddings, targets, gguf_type)
    if embeddings is not None:
        round_tables(find_tables(trained.model, trained.model.state_dict()), embeddings)
    if kind in FOLDERS and not trained.recipe.build_task().is_transformers:
        raise ValueError(
            f"--format {kind}: {trained.recipe.model.name} is not a model of Transformers"
        )
    if kind == "compressed-tensors":
        check_layers(trained.model, target_weights(trained.recipe, trained.model))
    if kind == "gguf":
        if not isinstance(trained.model, CausalModel):
            raise ValueError(
                f"--format gguf: {trained.recipe.model.name} is not a model that generates; "
                "allowed are runs of the task language-modelling"
            )
        gguf.check_source(trained.model.model, find_gguf_source(trained.recipe.model.name))


def export(
    trained: Trained,
    data: Dataset,
    to: Path,
    *,
    targets: Sequence[str],
    kind: str,
    values: str | None = None,
    embeddings: str | None = None,
    gguf_type: str | None = None,
    device: torch.device,
    progress: Callable[[object], None] | None = None,
) -> tuple[Result, list[Exported]]:
    """Compresses a trained model to every target, tests it and writes it.

    Files are written atomically. Temporary files of killed processes are removed from the folder.

    Args:
        trained: Finished training; its model stays unchanged.
        data: Dataset that it was trained and tested on.
        to: Folder that the files are written to; `global:0.9` becomes
            `global-0.9.torchcram.safetensors`, `global-0.9.safetensors`, `global-0.9` or
            `global-0.9.onnx`, and `int8` the folder `int8.compressed-tensors` or
            `int8.q8_0.gguf`.
        targets: Operators as text.
        kind: Format, one of `FORMATS`.
        values: Type that weights are rounded to unless they are quantized, one of `VALUES`. The
            rounded model is the one that is tested.
        embeddings: Quantizer of the tables of embeddings, such as "int8". The rounded model is the
            one that is tested.
        gguf_type: Type of the weights in GGUF files, one of `torchcram.integrations.gguf.TYPES`;
            by default it fits the target. The rounded model is the one that is tested.
        device: Device that everything is computed on.
        progress: Function that is called with every target once it is written.

    Returns:
        The scores, and the files.
    """
    check_export(trained, kind, values, embeddings, targets, gguf_type)
    rounding: dict[str, Any] = {
        "values": None if values is None else VALUES[values],
        "embeddings": embeddings,
    }
    trained = replace(trained, recipe=with_targets(trained.recipe, targets))
    remove_leftovers(to)
    written: list[Exported] = []

    require_same_data(trained, data)
    for small in compressed_models(
        trained.model, trained.recipe, data, targets, device=device, seed=trained.info.seed
    ):
        target, ending, stored = small.result(), ENDINGS[kind], None
        if kind == "gguf":
            stored = _round_as_gguf_(small.model, trained, target.operator, gguf_type)
            ending = f".{stored.kind}{ending}"
        elif values is not None or embeddings is not None:
            round_as_saved_(small.model, operator=target.operator, **rounding)
        if any(option is not None for option in (stored, values, embeddings)):
            score = score_on_test(small.model, trained.recipe, data, device=device)
            target = replace(target, after=score.value, others=score.others)
        path = to / f"{slug(target.operator)}{ending}"
        with name_file_in_errors(path):
            if stored is not None:
                gguf.write(path, stored)
            else:
                _write(
                    small.model,
                    trained,
                    data,
                    target=target,
                    path=path,
                    kind=kind,
                    rounding=rounding,
                )
        written.append(Exported(path, _size(path), target))
        if progress is not None:
            progress(target)
    return as_result(trained, [exported.target for exported in written]), written


def _round_as_gguf_(
    model: Any,  # noqa: ANN401  # a `CausalModel`
    trained: Trained,
    operator: str,
    gguf_type: str | None,
) -> gguf.StoredModel:
    """Gives a model the values that its weights have in a GGUF file; returns the content of it."""
    weights = target_weights(trained.recipe, model)
    stored = gguf.encode(
        model.model,
        find_gguf_source(trained.recipe.model.name),
        operator=operator,
        weights={name.removeprefix("model."): weight for name, weight in weights.items()},
        kind=gguf_type,
    )
    gguf.round_as_stored_(model.model, stored)
    return stored


def _write(
    model: nn.Module,
    trained: Trained,
    data: Dataset,
    *,
    target: TargetResult,
    path: Path,
    kind: str,
    rounding: dict[str, Any],
) -> None:
    operator = target.operator
    if kind == "torchcram":
        metadata = _metadata(trained, target, data)
        artifact.save(model, path, operator=operator, metadata=metadata, **rounding)
        return
    if kind == "safetensors":
        save_model(model, path)
        return
    if kind in FOLDERS:
        options: dict[str, Any] = {}
        if kind == "compressed-tensors":
            options = {"operator": operator, "weights": target_weights(trained.recipe, model)}
        with folder_written_aside(path) as aside:
            trained.recipe.build_task().save_pretrained(model, aside, **options)
        return
    from torchcram.runtime.onnx import export_onnx

    path.parent.mkdir(parents=True, exist_ok=True)
    model = model.cpu().eval()
    cpu = torch.device("cpu")
    batches = build_batches(trained.recipe, data, train=False, device=cpu, seed=0)
    inputs, _ = next(iter(batches.epoch(0)))
    weights = target_weights(trained.recipe, model)
    export_onnx(
        model,
        path,
        inputs[:SAMPLES],
        operator=parse_pruner(operator),
        weights=weights,
        dynamic_dims=trained.recipe.build_task().dynamic_dims(),
        metadata=trained.recipe.build_task().describe_inputs(data),
    )


def _metadata(trained: Trained, target: TargetResult, data: Dataset) -> dict[str, object]:
    recipe, info = trained.recipe, trained.info
    metrics: dict[str, object] = {
        "metric": recipe.metric,
        "dense": trained.finished.accuracy,
        "before": target.before,
        "after": target.after,
        "others": target.others or {},
    }
    return {
        "recipe": recipe.to_dict(),
        "seed": info.seed,
        "data": {"name": info.data.name, "test_images": info.data.test_images},
        "metrics": metrics,
        "sparsity": target.sparsity,
        "model_sparsity": target.model_sparsity,
        **recipe.build_task().describe_inputs(data),
    }


def _size(path: Path) -> int:
    """Returns the bytes of the weights in a folder, or of a file and its external data."""
    is_folder = path.is_dir()
    files = path.glob("*.safetensors") if is_folder else path.parent.glob(f"{path.name}*")
    return sum(file.stat().st_size for file in files)
