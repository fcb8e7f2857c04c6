"""Stable text of an FX graph. `compiler.graph.show` is the way in."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import torch
from torch import fx

_DTYPES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
}


class Printer:
    """Prints one graph; holds the renaming of nodes and symbols."""

    def __init__(self, graph: fx.Graph, *, renamed: bool = True) -> None:
        """Names are given in the order of the lines, once; or kept, with `renamed=False`."""
        self.renamed = renamed
        self.symbols: dict[str, str] = {}
        self.nodes = _by_first_use(graph) if renamed else list(graph.nodes)
        self.names = self._numbered() if renamed else {n: f"%{n.name}" for n in graph.nodes}

    def text(self) -> str:
        """The whole graph, a line a node."""
        return "\n".join(self.line(node) for node in self.nodes)

    def _numbered(self) -> dict[fx.Node, str]:
        """`%cat`, `%cat_1`, ...; inputs are `%arg0`, `%arg1`, ..."""
        counts: Counter[str] = Counter()
        names: dict[fx.Node, str] = {}
        for node in self.nodes:
            base = self._base(node)
            number = counts[base]
            counts[base] += 1
            separator = "" if node.op == "placeholder" else "_"
            bare = node.op != "placeholder" and number == 0
            names[node] = f"%{base}" if bare else f"%{base}{separator}{number}"
        return names

    def _base(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return "arg"
        if node.op == "output":
            return "return"
        return self.target(node).replace("cascade.", "").replace(".", "_")

    def target(self, node: fx.Node) -> str:
        """What a node calls: "cat", "cascade.merge"."""
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            namespace, name = target._schema.name.split("::")
            return name if namespace in ("aten", "prims") else f"{namespace}.{name}"
        if isinstance(target, str):
            return target
        return getattr(target, "__name__", str(target))

    def line(self, node: fx.Node) -> str:
        """One node: `%cat: f32[8, 16] = cat([%view, %arg2], 1)`."""
        if node.op == "output":
            return f"return {self._format(node.args[0])}"
        head = f"{self.names[node]}: {self.type_of(node.meta.get('val'))}"
        if node.op in ("placeholder", "get_attr"):
            return head
        parts = [self._format(a) for a in node.args]
        parts += [f"{k}={self._format(v)}" for k, v in node.kwargs.items()]
        return f"{head} = {self.target(node)}({', '.join(parts)})"

    def type_of(self, val: Any) -> str:
        """A node's value: `f32[8, 16]` for a tensor."""
        if isinstance(val, torch.Tensor):
            sizes = ", ".join(self._symbolic(s) for s in val.shape)
            return f"{_DTYPES.get(val.dtype, str(val.dtype))}[{sizes}]"
        if isinstance(val, (tuple, list)):
            return f"({', '.join(self.type_of(v) for v in val)})"
        if isinstance(val, dict):  # what a Triton kernel writes, by the names of its arguments
            return f"{{{', '.join(f'{k}: {self.type_of(v)}' for k, v in val.items())}}}"
        if isinstance(val, torch.SymInt):
            return self._symbolic(val)
        return type(val).__name__

    def _symbolic(self, size: Any) -> str:
        text = str(size)
        return re.sub(r"\b[suz]+f?\d+\b", self._symbol, text) if self.renamed else text

    def _symbol(self, match: re.Match[str]) -> str:
        name = match.group()
        return self.symbols.setdefault(name, f"{name[0]}{len(self.symbols)}")

    def _format(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self.names[arg]
        if isinstance(arg, (list, tuple)):
            return f"[{', '.join(self._format(a) for a in arg)}]"
        if isinstance(arg, dict):
            return f"{{{', '.join(f'{k}: {self._format(a)}' for k, a in arg.items())}}}"
        if isinstance(arg, float):
            return f"{arg:.6g}"
        return str(arg).replace("torch.", "") if isinstance(arg, torch.dtype) else str(arg)


def _by_first_use(graph: fx.Graph) -> list[fx.Node]:
    """The nodes, inputs first as they are used (Dynamo's order varies); unused ones left out."""
    body = [node for node in graph.nodes if node.op != "placeholder"]
    used = [n for node in body for n in node.all_input_nodes if n.op == "placeholder"]
    return [*dict.fromkeys(used), *body]
