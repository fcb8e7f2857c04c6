"""Cleanup after rewriting: nodes that nobody uses any more, and work done or written twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch.utils._pytree import tree_flatten

from torch_cascade.compiler.pass_base import Pass, PassContext
from torch_cascade.passes.site import move_tags
from torch_cascade.passes.written_once import REALIZE, written_once


@dataclass(frozen=True)
class CleanupPass(Pass):
    """Drops dead nodes, then joins equal nodes among those the passes made.

    Every layer slices the same mask and counts the same positions; a rewrite a layer would prepare
    them a layer. Nodes of the user's own graph are never joined: an unmatched graph stays as it is.
    Nor are buffers that Triton kernels write: shared, each would have to be copied. What several
    kernels then read is marked as written once.
    """

    name: ClassVar[str] = "cleanup"
    since: frozenset[fx.Node] = frozenset()

    def apply(self, graph: fx.Graph, context: PassContext) -> None:
        """Erase dead nodes, then each made node that repeats an earlier one; mark what is read."""
        graph.eliminate_dead_code()
        self._join(graph)
        for node in written_once(graph, self.since):
            node.meta[REALIZE] = True

    def _join(self, graph: fx.Graph) -> None:
        seen: dict[Any, fx.Node] = {}
        for node in list(graph.nodes):
            if node in self.since or node.op != "call_function" or not _is_pure(node):
                continue
            if any(_is_written(node, user) for user in node.users):
                continue
            key = _key(node)
            first = seen.setdefault(key, node)
            if first is not node:
                move_tags(node, first)
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True  # size arithmetic
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _is_written(node: fx.Node, user: fx.Node) -> bool:
    """Whether `user` is a Triton kernel that would write `node` if nobody else read it."""
    if user.target is not triton_kernel_wrapper_functional:
        return False
    arguments: Any = user.kwargs["kwargs"]
    written: Any = user.kwargs["tensors_to_clone"]
    return any(arguments[name] is node for name in written)


def _key(node: fx.Node) -> tuple[Any, ...]:
    leaves, spec = tree_flatten((node.args, node.kwargs))
    typed = tuple(
        (type(leaf), leaf if isinstance(leaf, fx.Node) else repr(leaf)) for leaf in leaves
    )
    return node.target, typed, spec
