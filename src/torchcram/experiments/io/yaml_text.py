"""YAML for recipes: safe, strict, and with 5e-4 for a number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from torchcram.experiments.io.dataclass_io import shown

_FLOAT = "tag:yaml.org,2002:float"
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")  # YAML 1.1 asks for 5.0e-4


class _Loader(yaml.SafeLoader):
    """Refuses a key that appears twice, and anchors, which could make data that has no end."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:  # noqa: ANN401
        if self.check_event(yaml.AliasEvent):
            reader: Any = self  # whose stubs have no types
            mark = reader.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases are not allowed", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401
        try:
            return super().construct_object(node, deep)
        except (
            ValueError,
            KeyError,
            IndexError,
            AttributeError,
            TypeError,
            OverflowError,
        ) as error:
            # of PyYAML's own, for a value that is not what its tag says; they name no line
            problem = f"{shown(node.value)} is no {node.tag.rpartition(':')[2]}"
            if isinstance(error, ValueError):
                problem += f", {error}"
            mark = node.start_mark
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key {key.value!r} appears twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Puts a text that reads like a number into quotes."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+.0123456789"))


def parse(text: str, where: str) -> Any:  # noqa: ANN401
    """Reads one YAML document.

    Args:
        text: of the document; an empty one is None.
        where: what it is from, for messages.

    Raises:
        ValueError: naming `where`, the line and the problem.
    """
    try:
        loader = _Loader(text)
        loader.name = where  # what marks in messages say
        return loader.get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not YAML: {' '.join(str(error).split())}") from None


def dump(data: object) -> str:
    """Writes plain data as YAML, which `parse` reads back."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=100)
    return text


def merged(base: object, over: object) -> Any:  # noqa: ANN401
    """Returns `base` with the values of `over` put in; mappings merge, all else is replaced."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}


def override(data: object, texts: Sequence[str]) -> Any:  # noqa: ANN401
    """Returns `data` with overrides such as "cram.rho=0.1" put in, one after another.

    The value is YAML. A section on the way that is not there is made.

    Raises:
        ValueError: naming the override that cannot be read.
    """
    for text in texts:
        key, equals, value = text.partition("=")
        names = key.strip().split(".")
        if not equals or not all(names):
            raise ValueError(f"override {text!r}: allowed is KEY=VALUE, such as train.epochs=3")
        over = parse(value, f"override {text!r}")
        for name in reversed(names):
            over = {name: over}
        data = merged(data, over)
    return data
