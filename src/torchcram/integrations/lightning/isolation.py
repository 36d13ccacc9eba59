"""Extra runs of a LightningModule that do not affect its logs and metrics."""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric, MetricCollection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.pytorch import Trainer
    from torch import nn

_LOG = inspect.signature(LightningModule.log)


class Isolation:
    """Copies of the metrics of a module, which replace the metrics during extra runs.

    Args:
        module: Module whose metrics, also those of its submodules, are copied.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._copies = [(p, name, _copied(metric)) for p, name, metric in _metrics(module)]

    @contextmanager
    def __call__(self, log: Callable[..., None]) -> Iterator[None]:
        """Redirects `module.log` to `log` in a `with` block, in which metrics start empty."""
        own = [(parent, name, parent._modules[name]) for parent, name, _ in self._copies]
        for parent, name, metric in self._copies:
            metric.reset()
            parent._modules[name] = metric
        object.__setattr__(self._module, "log", log)  # log_dict calls it too
        try:
            yield
        finally:
            object.__delattr__(self._module, "log")
            for parent, name, before in own:
                parent._modules[name] = before


class LogCapture:
    """Replacement of `LightningModule.log` that reduces over batches as Lightning does.

    Attributes:
        values: Reduced values by name, with the options for reducing them over ranks.
    """

    def __init__(self) -> None:
        self.values: dict[str, tuple[Tensor, dict[str, Any]]] = {}
        self._seen: dict[str, list[tuple[Any, int]]] = {}  # values and sizes of their batches
        self._options: dict[str, dict[str, Any]] = {}
        self._batch: Any = None
        self._suffix = ""

    def at(self, batch: object, loader: int | None) -> None:
        """Sets the batch, if any, and the loader, if there are several, of the next values."""
        self._batch = batch
        self._suffix = "" if loader is None else f"/dataloader_idx_{loader}"

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Records a value; the arguments are those of `LightningModule.log`."""
        call = _LOG.bind(None, *args, **kwargs)
        call.apply_defaults()
        arguments = call.arguments
        if arguments["on_epoch"] is False:
            return
        value, size = arguments["value"], arguments["batch_size"]
        if not isinstance(value, Metric):
            value = torch.as_tensor(value).detach().clone()
            if size is None:
                size = 1 if self._batch is None else extract_batch_size(self._batch)
        name = arguments["name"] + (self._suffix if arguments["add_dataloader_idx"] else "")
        self._seen.setdefault(name, []).append((value, size))
        self._options[name] = {key: arguments[key] for key in ("logger", "reduce_fx", "sync_dist")}

    def compute(self) -> None:
        """Reduces the recorded values over batches."""
        for name, seen in self._seen.items():
            options = self._options[name]
            if isinstance(seen[-1][0], Metric):
                self.values[name] = (seen[-1][0].compute(), {"logger": options["logger"]})
                continue
            function = getattr(options["reduce_fx"], "__name__", options["reduce_fx"])
            values = torch.stack([value.float() for value, _ in seen])
            if function == "mean":
                sizes = torch.tensor([size for _, size in seen], device=values.device)
                options["batch_size"] = int(sizes.sum())
                self.values[name] = ((values * sizes).sum() / sizes.sum(), options)
            else:
                self.values[name] = (getattr(torch, function)(values), options)


def ignore(*_: object, **__: object) -> None:
    """Logs nothing."""


def shallow(batch: Any) -> Any:  # noqa: ANN401
    """Returns a shallow copy of a dictionary, from which steps may pop labels; else the batch."""
    return copy.copy(batch) if isinstance(batch, dict) else batch


def _metrics(
    module: nn.Module,
) -> Iterator[tuple[nn.Module, str, Metric | MetricCollection]]:
    for name, child in module.named_children():
        if isinstance(child, (Metric, MetricCollection)):
            yield module, name, child
        else:
            yield from _metrics(child)


def _copied(metric: Metric | MetricCollection) -> Metric | MetricCollection:
    detached: dict[int, Tensor] = {}  # deepcopy refuses values that are part of a graph
    for part in metric.modules():
        for value in vars(part).values():
            for entry in value if isinstance(value, list) else (value,):
                if isinstance(entry, Tensor) and entry.requires_grad:
                    detached[id(entry)] = entry.detach()
    return copy.deepcopy(metric, detached)


class FitCallback(Callback, ABC):
    """Callback that releases its resources when a fit ends or fails."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Releases the resources."""
        self.release()

    def on_exception(
        self,
        trainer: Trainer,  # noqa: ARG002
        pl_module: LightningModule,  # noqa: ARG002
        exception: BaseException,  # noqa: ARG002
    ) -> None:
        """Releases the resources."""
        self.release()

    @abstractmethod
    def release(self) -> None:
        """Drops everything that was kept for the fit."""
