"""Extra runs of a LightningModule that leave its logs and metrics alone."""

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


class Apart:
    """Stand-ins for the metrics of a module, made once and swapped in for extra runs.

    Args:
        module: whose metrics, those inside other modules too, are copied.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._copies = [(p, name, _copied(metric)) for p, name, metric in _metrics(module)]

    @contextmanager
    def __call__(self, log: Callable[..., None]) -> Iterator[None]:
        """Sends what `module.log` is given to `log` in a `with` block; metrics begin anew there."""
        own = [(parent, name, parent._modules[name]) for parent, name, _ in self._copies]
        for parent, name, metric in self._copies:
            metric.reset()
            parent._modules[name] = metric
        object.__setattr__(self._module, "log", log)  # log_dict calls it, too
        try:
            yield
        finally:
            object.__delattr__(self._module, "log")
            for parent, name, before in own:
                parent._modules[name] = before


class Logged:
    """Stands in for `LightningModule.log` and reduces over batches as Lightning does.

    Attributes:
        values: by name, what came out and how to reduce it over processes.
    """

    def __init__(self) -> None:
        self.values: dict[str, tuple[Tensor, dict[str, Any]]] = {}
        self._seen: dict[str, list[tuple[Any, int]]] = {}  # values and sizes of their batches
        self._options: dict[str, dict[str, Any]] = {}
        self._batch: Any = None
        self._suffix = ""

    def at(self, batch: object, loader: int | None) -> None:
        """Says which batch, None for none, of which of several loaders the next values are of."""
        self._batch = batch
        self._suffix = "" if loader is None else f"/dataloader_idx_{loader}"

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Takes what `LightningModule.log` takes."""
        call = _LOG.bind(None, *args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if given["on_epoch"] is False:
            return
        value, size = given["value"], given["batch_size"]
        if not isinstance(value, Metric):
            value = torch.as_tensor(value).detach().clone()
            if size is None:
                size = 1 if self._batch is None else extract_batch_size(self._batch)
        name = given["name"] + (self._suffix if given["add_dataloader_idx"] else "")
        self._seen.setdefault(name, []).append((value, size))
        self._options[name] = {key: given[key] for key in ("logger", "reduce_fx", "sync_dist")}

    def compute(self) -> None:
        """Reduces over batches."""
        for name, seen in self._seen.items():
            options = self._options[name]
            if isinstance(seen[-1][0], Metric):
                self.values[name] = (seen[-1][0].compute(), {"logger": options["logger"]})
                continue
            how = getattr(options["reduce_fx"], "__name__", options["reduce_fx"])
            values = torch.stack([value.float() for value, _ in seen])
            if how == "mean":
                sizes = torch.tensor([size for _, size in seen], device=values.device)
                options["batch_size"] = int(sizes.sum())
                self.values[name] = ((values * sizes).sum() / sizes.sum(), options)
            else:
                self.values[name] = (getattr(torch, how)(values), options)


def ignore(*_: object, **__: object) -> None:
    """Logs nothing."""


def shallow(batch: Any) -> Any:  # noqa: ANN401
    """Returns a copy of a batch that is a dictionary: steps like to pop the labels out of it."""
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
    detached: dict[int, Tensor] = {}  # deepcopy refuses values that hang on a graph
    for part in metric.modules():
        for value in vars(part).values():
            for one in value if isinstance(value, list) else (value,):
                if isinstance(one, Tensor) and one.requires_grad:
                    detached[id(one)] = one.detach()
    return copy.deepcopy(metric, detached)


class LetsGo(Callback, ABC):
    """A callback that keeps things for a fit only, whether that ends or is broken off."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Lets go of them."""
        self.let_go()

    def on_exception(
        self,
        trainer: Trainer,  # noqa: ARG002
        pl_module: LightningModule,  # noqa: ARG002
        exception: BaseException,  # noqa: ARG002
    ) -> None:
        """Lets go of them."""
        self.let_go()

    @abstractmethod
    def let_go(self) -> None:
        """Drops what was kept."""
