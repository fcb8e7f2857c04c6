"""A linear layer in a functional graph: a product with a transposed weight, and its bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from torch_cascade.compiler.graph import shape, tensor
from torch_cascade.compiler.report import Declined, Reason

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass(frozen=True)
class LinearSite:
    """`node = x @ weight^T + bias`.

    Attributes:
        node: the product.
        x: rows [M, K].
        weight: [N, K], an input of the graph.
        bias: [N], an input of the graph, or None.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for sites that read the same rows and may share a launch.

        A view keeps the order of the elements: two of one tensor with the same sizes are the same.
        """
        root = self.x
        while root.target in _VIEWS:
            (root, *_) = root.all_input_nodes
        rows = tensor(self.x)
        return root, tuple(rows.shape), rows.stride(), rows.dtype, self.bias is None


def linear_of(node: fx.Node) -> LinearSite | Declined:
    """The linear layer whose product `node` is."""
    if node.target is aten.mm.default:
        bias, (x, transposed) = None, node.args
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, x, transposed = node.args
    else:
        return _declined(node, "no product of two matrices")
    assert isinstance(x, fx.Node) and isinstance(transposed, fx.Node)
    weight = _transposed(transposed)
    if weight is None or not _is_input(weight):
        return _declined(node, "the second factor is no transposed input of the graph")
    if bias is not None and not _is_bias(bias, weight):
        return _declined(node, "the addend is no input of the graph with an element a column")
    assert bias is None or isinstance(bias, fx.Node)
    return LinearSite(node, x, weight, bias)


def _transposed(node: fx.Node) -> fx.Node | None:
    """What a node is the transpose of; None where it is none."""
    (source, *axes) = node.args or (None,)
    of_t = node.target is aten.t.default
    of_permute = node.target is aten.permute.default and axes == [[1, 0]]
    of_transpose = node.target is aten.transpose.int and axes in ([0, 1], [1, 0])
    matches = of_t or of_permute or of_transpose
    return source if matches and isinstance(source, fx.Node) else None


def _is_input(node: fx.Node) -> bool:
    # A constant of the graph may stand anywhere, an input stands before every product.
    return node.op == "placeholder"


def _is_bias(node: object, weight: fx.Node) -> bool:
    # As expressions: to compare sizes that are symbols would add a guard.
    return isinstance(node, fx.Node) and _is_input(node) and shape(node) == shape(weight)[:1]


def _declined(node: fx.Node, detail: str) -> Declined:
    return Declined(Reason.NO_LINEAR, node.name, detail)
