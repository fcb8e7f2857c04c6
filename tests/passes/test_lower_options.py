"""The extended forms of `attend` and `merge`, lowered like any other: on CPU, to plain torch."""

import pytest
import torch
from support.attend_cases import assert_attends
from support.capture import boxed
from support.option_cases import ALL, EXTENDED, LENS, NAN, PLAIN
from support.tolerance import assert_close_to_reference

from torch_cascade.compiler.backend import compile_graph
from torch_cascade.compiler.options import Options
from torch_cascade.kernels import ops
from torch_cascade.kernels.reference import attend_reference, merge_reference


class Lowered:
    """A function compiled by the whole pipeline, its lowered graphs interpreted."""

    def __init__(self, function, *, dynamic):
        torch._dynamo.reset()
        self.targets = []
        resolved, patches = Options.resolve({})

        def inner(gm, inputs, **kwargs):
            self.targets += [n.target for n in gm.graph.nodes if n.op == "call_function"]
            return boxed(gm, inputs, **kwargs)

        def backend(gm, inputs):
            return compile_graph(gm, inputs, resolved, patches, inner_compile=inner)

        self.call = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)

    def __call__(self, *args):
        result = self.call(*args)
        assert self.targets
        ours = [t for t in self.targets if getattr(t, "namespace", "") == "cascade"]
        assert ours == []
        return result


def other_sizes(case):
    lens = (20, 3, 0) if case.lens else ()
    return case.but(rows=3, branches=2, queries=4, keys=24, lens=lens, hostile=NAN)


@pytest.mark.parametrize("case", [*EXTENDED[::6], ALL], ids=str)
def test_attend_equals_the_oracle(case):
    args, options = case.arguments()
    lowered = Lowered(lambda args, options: ops.attend(*args, **options), dynamic=False)
    assert_attends(lowered(args, options), args, options)


DYNAMIC = [
    PLAIN.but(lens=LENS, page=4),
    PLAIN.but(alibi=True, positions="NM", fp8=True, scales=True),
    pytest.param(ALL, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", DYNAMIC, ids=str)
def test_sizes_may_change(case):
    """One program serves any number of rows, branches, queries and pages."""

    def attend(q, args, options):
        return ops.attend(q.flatten(0, 1), *args, branches=q.size(1), **options)

    lowered = Lowered(attend, dynamic=True)
    for instance in (case, other_sizes(case)):
        (q, *rest), options = instance.arguments()
        branches = options.pop("branches")
        result = lowered(q.unflatten(0, (-1, branches)), rest, options)
        assert_attends(result, (q, *rest), {**options, "branches": branches})


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_cascade_over_pages_with_sinks(dynamic):
    """Two parts of fp8 pages, prefixes and suffixes of several lengths, with a sink a head."""

    def cascade(parts, sinks):
        pairs = [ops.attend(*args, **options) for args, options in parts]
        return ops.merge([o for o, _ in pairs], [lse for _, lse in pairs], sinks=sinks)

    lowered = Lowered(cascade, dynamic=dynamic)
    paged = PLAIN.but(page=4, fp8=True, scales=True, hostile=NAN, by_position=True)
    for branches in (3, 2) if dynamic else (3,):
        prefix = paged.but(lens=LENS, branches=branches)
        lens = [(5 * n) % 13 for n in range(2 * branches)]
        suffix = paged.but(lens=tuple(lens), rows=2 * branches, branches=1)
        parts = [prefix.arguments(), suffix.arguments()]
        q = parts[0][0][0]
        parts[1] = ((q, *parts[1][0][1:]), parts[1][1])
        sinks = torch.randn(q.size(1), 1, dtype=torch.bfloat16)
        o, lse = lowered(parts, sinks)
        expected = [
            merge_reference(
                *zip(*(attend_reference(*a, **x, dtype=d) for a, x in parts), strict=True),
                sinks=sinks,
                dtype=d,
            )
            for d in (torch.float32, torch.float64)
        ]
        assert_close_to_reference(o, expected[0][0], expected[1][0])
        assert_close_to_reference(lse, expected[0][1], expected[1][1])
