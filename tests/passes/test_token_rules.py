"""Every token rule against slicing: the op on rows of its operands is rows of the op."""

import operator
from dataclasses import dataclass

import pytest
import sympy
import torch
from support.token_cases import ALL, CASES, TESTED, Case
from support.tolerance import assert_close_to_reference
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from torch_cascade.compiler.graph import Sizes, shape
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.token_apply import apply_rows
from torch_cascade.passes.token_axis import plan_rows
from torch_cascade.passes.token_frontier import Frontier
from torch_cascade.passes.token_registry import RULES, is_pointwise, rule_of
from torch_cascade.passes.token_rows import Axis, Rows
from torch_cascade.passes.verify import check_graph

COUNTS = (0, 1, 3)


@dataclass
class Call:
    """A graph of one op, all of whose operands are inputs: (the graph, its results)."""

    case: Case

    def __post_init__(self):
        args, kwargs = self.case.make(torch.float32)
        leaves, spec = tree_flatten((args, kwargs))
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        nodes = [self._input(leaf, i) for i, leaf in enumerate(leaves)]
        given, options = tree_unflatten(nodes, spec)
        node = self.graph.call_function(self.case.op, tuple(given), options)
        fakes = tree_map(self._fake, (tuple(args), kwargs))
        with self.mode:
            node.meta["val"] = self.case.op(*fakes[0], **fakes[1])
        self.results = [node]
        if not isinstance(node.meta["val"], torch.Tensor):
            self.results = [self._result(node, i) for i in range(len(node.meta["val"]))]
        self.graph.output(tuple(self.results))

    def _input(self, leaf, index):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = self.graph.placeholder(f"x{index}")
        node.meta["val"] = self._fake(leaf)
        return node

    def _fake(self, leaf):
        return self.mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _result(self, node, index):
        result = self.graph.call_function(operator.getitem, (node, index))
        result.meta["val"] = node.meta["val"][index]
        return result

    def inputs(self, dtype):
        leaves, _ = tree_flatten(self.case.make(dtype))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def full(self, result, dtype):
        module = fx.GraphModule({}, self.graph)
        return module(*self.inputs(dtype))[self.results.index(result)]

    def plan(self, result, asked):
        full = frozenset(n for n in self.graph.nodes if n.op == "placeholder")
        frontier = Frontier(full, frozenset(self.graph.nodes) - full)
        return plan_rows(
            self.graph,
            frontier,
            tokens=asked.tokens.length,
            batch=None if asked.batch is None else asked.batch.length,
            rows=[(result, asked)],
            sizes=Sizes.of(self.graph) if self.case_has_inputs() else Sizes(None),
        )

    def case_has_inputs(self):
        return any(n.op == "placeholder" for n in self.graph.nodes)


def number(n):
    return sympy.Integer(n)


def axes(size, dim):
    """All ways to see an axis of two or more in a dim."""
    for length in range(2, size + 1):
        for outer in range(1, size // length + 1):
            if size % (outer * length) == 0:
                inner = size // (outer * length)
                yield Axis(dim, number(length), number(outer), number(inner))


def demands(node):
    """Rows along every axis of every dim, shared, and for batch axes beside it."""
    sizes = [int(s) for s in shape(node)]
    for dim, size in enumerate(sizes):
        for tokens in axes(size, dim):
            yield Rows(tokens)
            yield from (Rows(tokens, batch) for batch in merged(tokens))
        if size > 1:
            yield from beside(Axis(dim, number(size)), sizes)


def beside(tokens, sizes):
    """Batch axes in other dims, alone there or in front of something."""
    for dim, size in enumerate(sizes):
        found = axes(size, dim) if dim != tokens.dim else ()
        yield from (Rows(tokens, batch) for batch in found if batch.outer == 1)


def merged(tokens):
    """Batch axes before the tokens in the same dim."""
    for batch in axes(int(tokens.outer), tokens.dim):
        after = tokens.length * tokens.inner
        yield Axis(tokens.dim, batch.length, batch.outer, batch.inner * after)


def is_plain(rows):
    parts = [rows.tokens] + ([] if rows.batch is None else [rows.batch])
    return all(axis.outer == axis.inner == 1 for axis in parts)


def taken(x, rows, index):
    """The rows of a full value, by advanced indexing."""
    tokens, batch, sizes = rows.tokens, rows.batch, list(x.shape)
    t, b = int(tokens.length), None if batch is None else int(batch.length)
    cuts = {tokens.dim: [int(tokens.outer), t, int(tokens.inner)]}
    where = {tokens.dim: [None, "t", None]}
    if batch is not None and batch.dim == tokens.dim:
        between = int(tokens.outer) // (int(batch.outer) * b)
        cuts[tokens.dim] = [int(batch.outer), b, between, t, int(tokens.inner)]
        where[tokens.dim] = [None, "b", None, "t", None]
    elif batch is not None:
        cuts[batch.dim] = [int(batch.outer), b, int(batch.inner)]
        where[batch.dim] = [None, "b", None]
    split = [s for d, size in enumerate(sizes) for s in cuts.get(d, [size])]
    names = [n for d in range(len(sizes)) for n in where.get(d, [None])]
    x = x.reshape(split)
    if batch is None:
        picked = x.movedim(names.index("t"), 0)[index].movedim(0, names.index("t"))
    else:
        each = torch.arange(b)[:, None]
        home = (names.index("b"), names.index("t"))
        picked = x.movedim(home, (0, 1))[each, index].movedim((0, 1), home)
    sizes[tokens.dim] = int(tokens.outer) * index.shape[-1] * int(tokens.inner)
    return picked.reshape(sizes)


def index_of(rows, count):
    generator = torch.Generator().manual_seed(count)
    lead = () if rows.batch is None else (int(rows.batch.length),)
    return torch.randint(0, int(rows.tokens.length), (*lead, count), generator=generator)


def made(call, result, asked, index):
    """The rows that the plan makes, computed."""
    plan = call.plan(result, asked)
    assert not isinstance(plan, Declined)
    copies = {}
    graph = fx.Graph()
    graph.graph_copy(call.graph, copies)
    anchor = next(iter(graph.nodes))
    with graph.inserting_before(anchor):
        rows = graph.placeholder("rows")
    rows.meta["val"] = call.mode.from_tensor(index)
    fresh = Call.plan.__get__(_Copy(call, graph, copies))(copies[result], asked)
    out = apply_rows(fresh, rows).of(copies[result], asked)
    graph.output(out)
    graph.eliminate_dead_code()
    check_graph(graph, after="rows")
    return fx.GraphModule({}, graph)(index, *call.inputs(torch.float32))


class _Copy:
    """A call in a graph of its own."""

    def __init__(self, call, graph, copies):
        self.case, self.graph = call.case, graph
        self.case_has_inputs = lambda: True
        self.results = [copies[r] for r in call.results]


def expected_plain(case, rows, rank):
    everything = set(range(rank))
    dims = everything if case.dims == ALL else case.dims
    if rows.tokens.dim not in dims:
        return False
    if rows.batch is None:
        return True
    batch = dims if case.batch is None else case.batch
    return rows.batch.dim in batch and (rows.tokens.dim, rows.batch.dim) not in case.apart


def test_every_rule_has_a_case():
    assert set(RULES) - TESTED == set()
    assert all(rule_of(target) for target in TESTED)
    assert all(target in RULES or is_pointwise(target) for target in TESTED)


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{c}" for i, c in enumerate(CASES)])
def test_rows_of_the_op_are_the_op_of_rows(case):
    call = Call(case)
    compared = 0
    for result in call.results:
        full = {dtype: call.full(result, dtype) for dtype in (torch.float32, torch.float64)}
        for asked in demands(result):
            plan = call.plan(result, asked)
            if is_plain(asked):
                wanted = expected_plain(case, asked, len(shape(result)))
                assert wanted == (not isinstance(plan, Declined)), (asked, plan)
            if isinstance(plan, Declined):
                assert plan.reason is Reason.TOKENS_MIXED and plan.node and plan.detail
                continue
            for count in COUNTS if is_plain(asked) else COUNTS[-1:]:
                compare(call, result, asked, index_of(asked, count), full)
                compared += 1
    assert compared or case.dims == set()


def compare(call, result, asked, index, full):
    actual = made(call, result, asked, index)
    eager, reference = (taken(full[d], asked, index) for d in (torch.float32, torch.float64))
    assert actual.dtype == eager.dtype and actual.shape == eager.shape, (asked, actual.shape)
    if actual.dtype.is_floating_point and actual.numel():
        assert_close_to_reference(actual, eager, reference.double())
    else:
        assert torch.equal(actual, eager), asked
