"""A functional graph as a Python module that runs: FX prints the code, this adds what it needs.

The module has `Graph`, an `nn.Module` that takes the graph's inputs in order (symbolic sizes are
ordinary integers), `INPUTS`, a description of them with the sizes of the call that was compiled,
and `make_inputs(seed)`. Bodies of higher-order ops are modules of their own in the same file.
Tensors that the graph itself holds are in a file beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import _format_import_block
from torch.package.importer import sys_importer

from torch_cascade.compiler.graph import Sizes
from torch_cascade.compiler.random_inputs import Strided, default_values, describe
from torch_cascade.compiler.runnable_kernels import NotRunnable, by_name, table

__all__ = ["CONSTANTS", "NotRunnable", "constants", "describe_all", "source"]

CONSTANTS = "constants.pt"

_HEAD = '''\
"""{title}

Made by torch_cascade; needs torch and torch_cascade. Run this file to run the graph once on random
inputs, or import `Graph` and `make_inputs` from it. Sizes, strides, dtypes and devices of `INPUTS`
are those of the call that was compiled; of its numbers only ranges and spreads were kept, and where
they could not be read integers are zeros.
"""

{imports}
import torch_cascade.kernels.ops  # defines torch.ops.cascade
from torch_cascade.compiler.random_inputs import Choice, Normal, Strided, Whole, random_inputs
'''

_TAIL = '''\


# One for each argument of `Graph.forward`, in order.
INPUTS = (
{inputs}
)


def make_inputs(seed=0):
    """Random inputs, the same for the same seed."""
    return random_inputs(INPUTS, seed)


if __name__ == "__main__":
    with torch.no_grad():
        results = Graph()(*make_inputs())
    for result in results:
        print(getattr(result, "dtype", type(result)), tuple(getattr(result, "shape", ())))
'''

_CONSTANTS = """\
        held = torch.load(Path(__file__).with_name({file!r}), weights_only=True)
"""


def source(graph: fx.Graph, title: str, known: Sequence[Strided | None] = ()) -> str:
    """The text of the module.

    Args:
        graph: functional ATen with values on its nodes.
        title: first line of the module's docstring.
        known: what the real inputs are like (`describe_all`), () if that is not known.

    Raises:
        NotRunnable: the graph uses something that has no text.
    """
    module = _owner(graph)
    code, found = _classes(module, graph, "Graph")
    imports = _format_import_block(found, sys_importer)
    if _constants_of(module, graph):
        imports += "\nfrom pathlib import Path"
    head = _HEAD.format(title=title, imports=imports) + table(_all_graphs(module, graph))
    return head + code + _TAIL.format(inputs=_inputs(graph, known))


def constants(graph: fx.Graph) -> dict[str, torch.Tensor]:
    """The tensors that a graph and its bodies hold, by class and attribute."""
    return dict(_constants_of(_owner(graph), graph))


def describe_all(inputs: Sequence[Any]) -> tuple[Strided | None, ...]:
    """What is kept of a graph's real inputs; None for one whose numbers cannot be read."""
    with torch.no_grad():
        return tuple(_described(x) for x in inputs)


def _described(x: Any) -> Strided | None:
    values = describe(x)
    if values is None:
        return None
    return Strided(tuple(x.shape), x.stride(), x.dtype, str(x.device), values)


def _owner(graph: fx.Graph) -> fx.GraphModule:
    module: Any = graph.owning_module
    if not isinstance(module, fx.GraphModule):
        raise NotRunnable("the graph belongs to no module")
    return module


def _classes(module: fx.GraphModule, graph: fx.Graph, name: str) -> tuple[str, dict[str, Any]]:
    """The classes of a graph's bodies, then its own; and the globals they use."""
    if any(node.op == "call_module" for node in graph.nodes):
        raise NotRunnable("the graph calls modules")
    code = graph.python_code("self", verbose=True)
    found, before, lines = dict(code.globals), "", []
    for target in _attributes(graph):
        value = _attribute(module, target)
        if isinstance(value, fx.GraphModule):
            inner = f"{name}_{target.replace('.', '_')}"
            text, more = _classes(value, value.graph, inner)
            before, found = before + text, found | more
            lines.append(f"        self.{target} = torch.fx.symbolic_trace({inner}())\n")
        elif not isinstance(value, torch.Tensor):
            raise NotRunnable(f"the graph holds {target}, a {type(value).__name__}")
    held = [t for t in _attributes(graph) if isinstance(_attribute(module, t), torch.Tensor)]
    if held:
        lines.append(_CONSTANTS.format(file=CONSTANTS))
        lines += [f'        self.register_buffer("{t}", held["{name}.{t}"])\n' for t in held]
    start = f"\n\nclass {name}(torch.nn.Module):\n"
    if lines:
        start += "    def __init__(self):\n        super().__init__()\n" + "".join(lines) + "\n"
    return before + start + by_name(_indented(code.src)), found


def _all_graphs(module: fx.GraphModule, graph: fx.Graph) -> list[fx.Graph]:
    """A graph and those of its bodies."""
    held = (_attribute(module, target) for target in _attributes(graph))
    bodies = [value for value in held if isinstance(value, fx.GraphModule)]
    return [graph, *(g for body in bodies for g in _all_graphs(body, body.graph))]


def _indented(text: str) -> str:
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return "\n".join(f"    {line}" if line else "" for line in lines) + "\n"


def _attributes(graph: fx.Graph) -> list[str]:
    """Names of what the graph holds, each once, in order."""
    return list(dict.fromkeys(str(node.target) for node in graph.find_nodes(op="get_attr")))


def _attribute(module: fx.GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _constants_of(
    module: fx.GraphModule, graph: fx.Graph, name: str = "Graph"
) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for target in _attributes(graph):
        value = _attribute(module, target)
        if isinstance(value, torch.Tensor):
            found[f"{name}.{target}"] = value
        elif isinstance(value, fx.GraphModule):
            inner = f"{name}_{target.replace('.', '_')}"
            found |= _constants_of(value, value.graph, inner)
    return found


def _inputs(graph: fx.Graph, known: Sequence[Strided | None]) -> str:
    nodes = graph.find_nodes(op="placeholder")
    return "\n".join(
        f"    {x!r},  # {node.name}"
        for node, x in zip(nodes, _arguments(graph, known), strict=True)
    )


def _arguments(
    graph: fx.Graph, known: Sequence[Strided | None]
) -> list[Strided | int | float | bool]:
    """The inputs; what is known counts if it is about them all: AOTAutograd may add and drop."""
    sizes = Sizes.of(graph)
    nodes = graph.find_nodes(op="placeholder")
    plain = [_input(node, sizes) for node in nodes]
    pairs = list(zip(plain, known, strict=False))
    if len(plain) != len(known) or not all(_same(x, real) for x, real in pairs):
        return plain
    return [replace(x, values=k.values) if isinstance(x, Strided) and k else x for x, k in pairs]


def _same(x: Strided | int | float | bool, real: Strided | None) -> bool:
    if real is None or not isinstance(x, Strided):
        return real is None
    return (x.shape, x.dtype) == (real.shape, real.dtype)


def _input(node: fx.Node, sizes: Sizes) -> Strided | int | float | bool:
    value = node.meta.get("val")
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, torch.SymInt):
        return _hint(value, sizes)
    if not isinstance(value, torch.Tensor):
        raise NotRunnable(f"input {node.name} is a {type(value).__name__}")
    return Strided(
        tuple(_hint(size, sizes) for size in value.shape),
        tuple(_hint(stride, sizes) for stride in value.stride()),
        value.dtype,
        str(value.device),
        default_values(value.dtype),
    )


def _hint(size: int | torch.SymInt, sizes: Sizes) -> int:
    hint = sizes.hint(size)
    if hint is None:
        raise NotRunnable(f"the size {size} depends on data")
    return hint
