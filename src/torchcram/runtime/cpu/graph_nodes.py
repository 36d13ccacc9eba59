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


def shape_of(node: object) -> tuple[int, ...]:
    """Returns the shape that was noted for a result (`torch.fx.passes.shape_prop`), or nothing."""
    meta = node.meta if isinstance(node, fx.Node) else {}
    return tuple(getattr(meta.get("tensor_meta"), "shape", ()))


def sections(model: fx.GraphModule) -> list[list[fx.Node]]:
    """Returns the nodes between the results that all further ones depend on."""
    nodes = list(model.graph.nodes)
    position = {node: index for index, node in enumerate(nodes)}
    last_use = {node: max(map(position.__getitem__, node.users), default=-1) for node in nodes}
    split: list[list[fx.Node]] = [[]]
    needed = -1  # position up to which a result before the current node is needed
    for index, node in enumerate(nodes):
        split[-1].append(node)
        alone = needed <= index  # nothing else is needed after this node
        needed = max(needed, last_use[node])
        if (
            alone
            and node.op not in ("placeholder", "output", "get_attr")
            and last_use[node] > index
        ):
            split.append([])
    return split


def refresh_(model: fx.GraphModule) -> None:
    """Checks a changed graph and generates its code."""
    model.graph.lint()
    model.delete_all_unused_submodules()
    model.recompile()
