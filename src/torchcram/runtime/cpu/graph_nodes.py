"""Nodes of `torch.fx` graphs: what they compute, and what follows them."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx, nn
from torch.nn import functional

_RELU: tuple[object, ...] = (torch.relu, functional.relu, torch.relu_, "relu", "relu_")
ADD: tuple[object, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
_ACTIVATION_OF: Mapping[object, str] = {
    **dict.fromkeys(_RELU, "relu"),
    functional.gelu: "gelu",
    functional.silu: "silu",
}


def module_of(modules: dict[str, nn.Module], node: object) -> nn.Module | None:
    """Returns the module that a node calls, or None."""
    if isinstance(node, fx.Node) and node.op == "call_module":
        return modules.get(str(node.target))
    return None


def only_user(node: fx.Node) -> fx.Node | None:
    """Returns the node that uses a result, or None if it is not exactly one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_call(node: fx.Node, targets: tuple[object, ...]) -> bool:
    """Returns whether a node calls one of the functions or methods."""
    return node.op in ("call_function", "call_method") and node.target in targets


def node_activation(modules: dict[str, nn.Module], node: fx.Node | None) -> str | None:
    """Returns the name of the activation that a node computes, or None."""
    if node is None:
        return None
    module = module_of(modules, node)
    if isinstance(module, nn.GELU) or node.target is functional.gelu:
        approximate = getattr(module, "approximate", node.kwargs.get("approximate", "none"))
        return "gelu" if approximate == "none" else "gelu_tanh"
    if isinstance(module, nn.ReLU):
        return "relu"
    if isinstance(module, nn.SiLU):
        return "silu"
    if node.op in ("call_function", "call_method"):
        return _ACTIVATION_OF.get(node.target)
    return None


def refresh_(model: fx.GraphModule) -> None:
    """Checks a changed graph and generates its code."""
    model.graph.lint()
    model.delete_all_unused_submodules()
    model.recompile()
