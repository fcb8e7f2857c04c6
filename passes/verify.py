"""Checks that a graph is what its metadata says (`TORCH_CASCADE_VERIFY=1`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import tracing
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_flatten
from torch.utils._sympy.functions import Max

from torch_cascade.compiler.graph import Size, SizeLike, Sizes, fake_mode, size_expr, value


class GraphError(RuntimeError):
    """A pass left a graph that contradicts its own metadata."""


@dataclass(frozen=True)
class Run:
    """One call of a node on fakes; nothing is learned from the same call again.

    Attributes:
        target: what was called.
        read: what it depended on, flat: arguments with values in the place of nodes.
        result: what it gave.
    """

    target: Any
    read: tuple[Any, ...]
    result: Any

    def is_of(self, target: Any, read: Sequence[Any]) -> bool:
        """Whether that call is this one: tensors and symbols are the same objects, others equal."""
        same_length = target is self.target and len(read) == len(self.read)
        return same_length and all(map(_is_same, read, self.read))


Runs = dict[fx.Node, Run]


def check_graph(graph: fx.Graph, *, after: str, earlier: Runs | None = None) -> Runs:
    """Run every call on fakes and compare dtype, device, sizes and strides with the metadata.

    Args:
        graph: functional ATen with `meta["val"]` on every node.
        after: name of the pass that just ran, for the message.
        earlier: the calls that were right before that pass; only others are run.

    Returns:
        The calls, which are right.

    Raises:
        GraphError: naming the node, what was expected and what it yields.
    """
    try:
        graph.lint()
    except Exception as error:
        raise GraphError(f"after pass {after}: {error}") from error
    runs: Runs = {}
    for node in graph.nodes:
        if node.op == "call_function" and all("val" in n.meta for n in _with_inputs(node)):
            runs[node] = _checked(node, after, (earlier or {}).get(node))
        # runtime assertions have no value, nor have the bodies of higher-order ops
    return runs


def _checked(node: fx.Node, after: str, earlier: Run | None) -> Run:
    args, kwargs = fx.map_arg((node.args, node.kwargs), value)
    leaves, spec = tree_flatten((args, kwargs, value(node)))
    target: Any = node.target
    read = (spec, *leaves)
    if earlier is not None and earlier.is_of(target, read):
        return earlier
    try:
        with replaying(node.graph):
            actual = target(*args, **kwargs)
    except Exception as error:
        told = f"node {node.format_node()}: it cannot be computed: {error}"
        raise GraphError(f"after pass {after}: {told}") from error
    _compare(node, value(node), actual, Sizes.of(node.graph), after)
    return Run(target, read, actual)


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return a is b
    return a is b or (type(a) is type(b) and bool(a == b))


def check_lowered(nodes: Iterable[fx.Node], *, after: str) -> None:
    """Ops that Inductor takes apart before the passes run have no lowering: no pass may add one.

    Args:
        nodes: those that a pass made.
        after: name of that pass, for the message.

    Raises:
        GraphError: naming the node and its op.
    """
    # Not before a graph is compiled: this takes seconds, and Inductor needs them itself then.
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings

    for node in nodes:
        is_op = isinstance(node.target, torch._ops.OpOverload)
        if is_op and node.target in decompositions and node.target not in lowerings:
            raise GraphError(
                f"after pass {after}: node {node.format_node()}: Inductor has taken apart every "
                f"{node.target} before the passes run, and lowers none: expected the ops that it "
                "consists of"
            )


@contextlib.contextmanager
def replaying(graph: fx.Graph) -> Iterator[None]:
    """Run ops on a graph's fakes again, and leave no trace of it.

    An op whose sizes only data tells makes a new symbol each time. Nobody will bind those made
    here, and unless torch is told to ignore them, it fails the next op that it traces for that.
    """
    mode = fake_mode(graph)
    env = mode.shape_env
    ignoring = contextlib.nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()
    with tracing(None), mode, ignoring:
        yield


def _with_inputs(node: fx.Node) -> list[fx.Node]:
    return [node, *node.all_input_nodes]


def _compare(node: fx.Node, expected: Any, actual: Any, sizes: Sizes, after: str) -> None:
    if isinstance(expected, dict):
        expected, actual = list(expected.values()), list(actual.values())
    if isinstance(expected, (tuple, list)):
        for e, a in zip(expected, actual, strict=True):
            _compare(node, e, a, sizes, after)
        return
    if not isinstance(expected, torch.Tensor):
        return
    if not (isinstance(actual, torch.Tensor) and alike(expected, actual, sizes)):
        raise GraphError(
            f"after pass {after}: node {node.format_node()}: its metadata says "
            f"{described(expected)}, it yields {described(actual)}"
        )


def alike(a: torch.Tensor, b: torch.Tensor, sizes: Sizes, *, strides: bool = True) -> bool:
    """The same dtype, device, sizes and strides; those of dims of size 1 mean nothing."""
    if a.dtype != b.dtype or a.device != b.device or a.dim() != b.dim():
        return False
    pairs = [*zip(a.shape, b.shape, strict=True)]
    rows = zip(a.shape, a.stride(), b.stride(), strict=True) if strides else ()
    pairs += [(_stride(s), _stride(t)) for size, s, t in rows if size_expr(size) != 1]
    return all(same_size(s, t, sizes) for s, t in pairs)


def same_size(a: SizeLike, b: SizeLike, sizes: Sizes) -> bool:
    """Provably equal, or equal in the call being compiled where no proof is found.

    Sizes that only data tells get a new symbol each time an op is run, so two of them may be equal.
    """
    if free_unbacked_symbols(size_expr(a)) and free_unbacked_symbols(size_expr(b)):
        return True
    hints = sizes.hint(a), sizes.hint(b)
    return sizes.equal(a, b) or (None not in hints and hints[0] == hints[1])


def _stride(stride: SizeLike) -> Size:
    """A stride without torch's `Max(1, size)`: strides of an empty tensor mean nothing."""
    expr = size_expr(stride)
    clamps = [a for a in expr.atoms(Max) if len(a.args) == 2 and a.args[0] == 1]
    return expr.xreplace({clamp: clamp.args[1] for clamp in clamps})


def described(found: Any) -> str:
    """What is compared of a value, for messages."""
    if not isinstance(found, torch.Tensor):
        return f"{type(found).__name__} {found}"
    return f"{found.dtype} {tuple(found.shape)} strides {found.stride()} on {found.device}"
