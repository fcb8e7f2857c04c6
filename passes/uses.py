"""What a pass may not change: the results of a graph, and what the nodes it left alone read.

`TORCH_CASCADE_VERIFY=1` takes down before each pass what every node reads, and which graph inputs
and results each value shares memory with. After the pass, a node that is still there must read
values of the same dtype, device, sizes and strides, in the same memory. That a graph agrees with
its own metadata is the business of `passes/verify.py`.

Memory is compared on fakes: the graph is run once on those of its inputs, and the storage of a fake
says what is a view of what. Only graph inputs and results count. AOTAutograd has told the program
which of these share memory, and it may write to them; between other values of a functional graph
sharing means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_iter, tree_leaves

from torch_cascade.compiler.graph import Sizes
from torch_cascade.passes.verify import (
    GraphError,
    Run,
    Runs,
    alike,
    described,
    replaying,
    same_size,
)

Aliases = dict[fx.Node, frozenset[str]]


@dataclass(frozen=True)
class Uses:
    """What the nodes of a graph read.

    Attributes:
        reads: for each node its target, and the nodes among its arguments, in order.
        values: of each node that has one.
        aliases: for each node the graph inputs and results that share memory with it, by name.
        runs: how each node was run on fakes, to run only what a pass has changed again.
    """

    reads: dict[fx.Node, tuple[Any, tuple[fx.Node, ...]]]
    values: dict[fx.Node, Any]
    aliases: Aliases
    runs: Runs

    @classmethod
    def of(cls, graph: fx.Graph, earlier: Uses | None = None) -> Uses:
        """Take it down; nothing is edited.

        Args:
            graph: the graph.
            earlier: what was taken down of the same graph before a pass.
        """
        reads = {node: (node.target, _read(node)) for node in graph.nodes}
        values = {node: node.meta["val"] for node in graph.nodes if "val" in node.meta}
        runs = _run_on_fakes(graph, {} if earlier is None else earlier.runs)
        return cls(reads, values, _aliases(graph, runs), runs)

    def check(self, graph: fx.Graph, *, after: str, strides: bool = True) -> Uses:
        """Compare with the same graph after a pass.

        Args:
            graph: the graph.
            after: name of the pass that just ran, for the message.
            strides: whether they must be the same, too.

        Returns:
            What was taken down after the pass: what the next one may not change.

        Raises:
            GraphError: naming the reader, what it read before and what it reads now.
        """
        now, sizes = Uses.of(graph, self), Sizes.of(graph)
        for node, (target, read) in sorted(now.reads.items(), key=_results_first):
            is_result = node.op == "output"
            old_target, old_read = self.reads.get(node, (None, ()))
            if is_result and len(old_read) != len(read):
                counts = f"{len(read)} results, it had {len(old_read)}"
                raise GraphError(f"after pass {after}: the graph has {counts}")
            if old_target != target or len(old_read) != len(read):
                continue  # made or edited by the pass: what it yields is checked by its metadata
            for old, new in zip(old_read, read, strict=True):
                compared = self.values.get(old), now.values.get(new)
                problem = _values_differ(*compared, sizes, strides)
                if not problem and (is_result or new is not old):
                    problem = _memory_differs(self.aliases.get(old), now.aliases.get(new))
                if problem:
                    reader = "the graph returns" if is_result else f"{node.name} reads"
                    instead = "" if new is old else f" in place of {old.name}"
                    raise GraphError(f"after pass {after}: {reader} {new.name}{instead}: {problem}")
        return now


def _results_first(entry: tuple[fx.Node, Any]) -> bool:
    return entry[0].op != "output"


def _read(node: fx.Node) -> tuple[fx.Node, ...]:
    return tuple(n for n in tree_leaves((node.args, node.kwargs)) if isinstance(n, fx.Node))


def _values_differ(old: Any, new: Any, sizes: Sizes, strides: bool) -> str:
    """How they do; "" if they are alike. Bodies of higher-order ops have no value."""
    if old is new:
        return ""
    pairs = [*zip(tree_leaves(old), tree_leaves(new), strict=False)]
    same = len(tree_leaves(old)) == len(tree_leaves(new))
    if same and all(_alike(a, b, sizes, strides) for a, b in pairs):
        return ""
    return f"expected {described(old)}, got {described(new)}"


def _alike(a: Any, b: Any, sizes: Sizes, strides: bool) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return alike(a, b, sizes, strides=strides)
    whole = (int, torch.SymInt)
    if isinstance(a, whole) and isinstance(b, whole):
        return same_size(a, b, sizes)
    return type(a) is type(b)


def _memory_differs(old: frozenset[str] | None, new: frozenset[str] | None) -> str:
    if old == new or old is None or new is None:
        return ""
    more, fewer = sorted(new - old), sorted(old - new)
    said = [f"shares memory with {', '.join(more)}, and did not before"] if more else []
    said += [f"no longer shares memory with {', '.join(fewer)}"] if fewer else []
    return " and ".join(said)


def _aliases(graph: fx.Graph, runs: Runs) -> Aliases:
    """What shares memory; the runs keep the fakes alive, so that a storage has one address."""
    storages = {node: _storages(run.result) for node, run in runs.items()}
    named: dict[int, set[str]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            for storage in storages.get(node, ()):
                named.setdefault(storage, set()).add(node.name)
    for place, result in enumerate(_read(graph.output_node())):
        for storage in storages.get(result, ()):
            named.setdefault(storage, set()).add(f"result {place}")
    return {
        node: frozenset().union(*(named.get(storage, ()) for storage in found))
        for node, found in storages.items()
    }


def _run_on_fakes(graph: fx.Graph, earlier: Runs) -> Runs:
    """A fake result for each node that can be run; a size is what its metadata says.

    A call that was made before a pass on the same fakes is not made again.
    """
    runs: Runs = {}
    with replaying(graph):
        for node in graph.nodes:
            if "val" in node.meta:
                runs[node] = _run(node, runs, earlier.get(node))
    return runs


def _run(node: fx.Node, runs: Runs, earlier: Run | None) -> Run:
    held = node.meta["val"]
    has_tensor = any(isinstance(leaf, torch.Tensor) for leaf in tree_iter(held))
    # Run again, an op whose sizes only data tells has other symbols, of which nothing is known.
    names_sizes = bool(node.meta.get("unbacked_bindings"))
    runs_at_all = node.op == "call_function" and has_tensor and not names_sizes
    if not runs_at_all or any(n not in runs for n in node.all_input_nodes):
        return Run(None, (), held)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: runs[n].result)
    leaves, spec = tree_flatten((args, kwargs))
    target: Any = node.target
    read = (spec, *leaves)
    if earlier is not None and earlier.is_of(target, read):
        return earlier
    return Run(target, read, target(*args, **kwargs))


def _storages(result: Any) -> frozenset[int]:
    tensors = (leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor))
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)
