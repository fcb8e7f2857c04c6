"""The extended forms of `attend` (lengths, pages, fp8, ALiBi) against the float64 oracle."""

import math

import pytest
import torch
from support.attend_cases import assert_attends
from support.option_cases import ALL, EXTENDED, LENS, NAN, PLAIN
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from torch_cascade.kernels import ops
from torch_cascade.kernels.cpu_attend import attend_cpu, attend_math
from torch_cascade.kernels.reference import attend_reference

cascade = torch.ops.cascade
both = pytest.mark.parametrize("attend", [attend_cpu, attend_math], ids=lambda f: f.__name__)


def test_the_cases_differ():
    assert len(set(EXTENDED)) == len(EXTENDED) > 50
    assert len({str(case) for case in EXTENDED}) == len(EXTENDED)


@both
@pytest.mark.parametrize("case", EXTENDED, ids=str)
def test_equals_the_oracle(attend, case):
    args, options = case.arguments()
    assert_attends(attend(*args, **options), args, options)


@pytest.mark.parametrize("case", EXTENDED[::5], ids=str)
def test_the_op_writes_no_argument_and_aliases_none(case):
    args, options = case.arguments()
    given = [a for a in (*args, *options.values()) if isinstance(a, torch.Tensor)]
    before = [a.clone() for a in given]
    for got, expected in zip(
        ops.attend(*args, **options), attend_cpu(*args, **options), strict=True
    ):
        assert torch.equal(got, expected)
        got.fill_(7.0)
    pairs = zip(given, before, strict=True)
    assert all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(x):
    """A tensor as integers: NaN equals itself."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(widths[x.element_size()])


# --- the oracle's options, against its own base form ----------------------------------------------


def test_lengths_of_the_oracle_are_slices():
    args, options = PLAIN.but(lens=LENS, hostile=NAN).arguments()
    q, k, v, _ = args
    o, lse = attend_reference(*args, **options)
    for row, held in enumerate(LENS):
        rows = slice(row * 3, row * 3 + 3)
        alone = k[row : row + 1, :, :held], v[row : row + 1, :, :held]
        expected = attend_reference(q[rows], *alone, branches=3)
        torch.testing.assert_close((o[rows], lse[rows]), expected)


def test_pages_of_the_oracle_by_hand():
    """Two rows share page 2, in different places."""
    q, pool = torch.randn(2, 2, 1, 8).double(), torch.randn(3, 1, 2, 8).double()
    table = torch.tensor([[2, 0], [1, 2]])
    k = torch.stack([torch.cat([pool[2], pool[0]], 1), torch.cat([pool[1], pool[2]], 1)])
    expected = attend_reference(q, k, k)
    torch.testing.assert_close(attend_reference(q, pool, pool, page_table=table), expected)
    torch.testing.assert_close(ops.attend(q, pool, pool, page_table=table), expected)


def test_alibi_of_the_oracle_is_a_bias():
    args, options = PLAIN.but(alibi=True, positions="NM", kv_start=4).arguments()
    q, k, v, _ = args
    slopes = options.pop("alibi_slopes").double()
    bias = torch.empty(6, 6, 5, 12, dtype=torch.float64)
    for n, h, m, j in torch.cartesian_prod(*(torch.arange(s) for s in bias.shape)).tolist():
        bias[n, h, m, j] = slopes[h] * (4 + j - options["q_positions"][n, m])
    expected = attend_reference(q, k, v, bias, **options)
    torch.testing.assert_close(attend_reference(*args, **options, alibi_slopes=slopes), expected)


def test_scales_of_the_oracle_multiply_keys_and_values():
    args, options = PLAIN.but(fp8=True, scales=True).arguments()
    q, k, v, _ = args
    by_head = [options[name].double()[:, None, None] for name in ("k_scale", "v_scale")]
    expected = attend_reference(q, k.double() * by_head[0], v.double() * by_head[1], branches=3)
    torch.testing.assert_close(attend_reference(*args, **options), expected)


# --- nothing of what is not read remains ---------------------------------------------------------


@both
@pytest.mark.parametrize("page", [0, 4])
@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
def test_unread_keys_may_hold_anything(attend, page, fp8):
    """The same bits come out whatever stands in unread keys, pages and table entries."""
    case = PLAIN.but(lens=LENS, page=page, fp8=fp8)
    results = []
    for hostile in ("needle", NAN):
        torch.manual_seed(1)
        args, options = case.but(hostile=hostile).arguments()
        results.append(attend(*args, **options))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@both
def test_values_of_infinity_in_unread_keys(attend):
    (q, k, v, mask), options = PLAIN.but(lens=LENS).arguments()
    expected = attend(q, k, v, mask, **options)
    for row, held in enumerate(LENS):
        k[row, :, held:], v[row, :, held:] = -math.inf, math.inf
    got = attend(q, k, v, mask, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@both
@pytest.mark.parametrize("page", [0, 4])
def test_a_row_of_length_zero_is_the_identity_of_merge(attend, page):
    args, options = PLAIN.but(lens=(0, 7), page=page, hostile=NAN).arguments()
    o, lse = attend(*args, **options)
    assert (o[:3] == 0).all()
    assert (lse[:3] == -math.inf).all()
    assert torch.isfinite(lse[3:]).all()


@both
def test_every_bound_of_a_length(attend):
    """For each length the last key counts and the next one does not."""
    for held in range(13):
        args, options = PLAIN.but(lens=(held, 12 - held), page=4).arguments()
        assert_attends(attend(*args, **options), args, options)


@both
def test_positions_far_out_are_exact(attend):
    """Distances are taken in integers: positions near 2^30 have no float32 of their own."""
    (q, k, v, mask), options = PLAIN.but(alibi=True, positions="NM").arguments()
    near = attend(q, k, v, mask, **options)
    options["kv_start"] += 2**30 + 1
    options["q_positions"] += 2**30 + 1
    far = attend(q, k, v, mask, **options)
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))


def test_a_page_outside_the_pool_is_an_error():
    args, options = PLAIN.but(page=4).arguments()
    for entry in (10**6, -1):
        options["page_table"][1, 2] = entry
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            ops.attend(*args, **options)


# --- through the compilers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        PLAIN.but(lens=LENS, integers=torch.int32, hostile=NAN),
        PLAIN.but(page=4, by_position=True, hostile=NAN),
        PLAIN.but(fp8=True, scales=True, dtype=torch.bfloat16),
        PLAIN.but(alibi=True, positions="NM"),
        ALL,
        PLAIN.but(lens=(0, 0), page=4, integers=torch.int32),
    ],
    ids=str,
)
def test_opcheck(case):
    args, options = case.arguments()
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not case.fp8:  # it compares inputs before and after, which torch cannot do for fp8
        tests.append("test_schema")
    torch.library.opcheck(cascade.attend.default, args, options, test_utils=tests)


@pytest.mark.parametrize("attend", [ops.attend, attend_cpu, attend_math], ids=lambda f: f.__name__)
def test_compiled(attend):
    """By Inductor, with sizes that change between calls; `ops.attend` stays one op in it."""
    torch._dynamo.reset()
    compiled = torch.compile(attend, dynamic=True, fullgraph=True)
    for change in ({}, {"rows": 3, "lens": (4, 12, 0), "queries": 7, "keys": 16}):
        args, options = ALL.but(hostile=NAN, **change).arguments()
        assert_attends(compiled(*args, **options), args, options)


SYMBOLIC = [
    PLAIN.but(lens=LENS),
    PLAIN.but(page=4, by_position=True),
    PLAIN.but(page=4, lens=LENS, mask="N1ML"),
    PLAIN.but(fp8=True, scales=True),
    PLAIN.but(alibi=True, positions="NM", mask="11ML"),
    ALL,
]


class Symbols:
    """Fake arguments of an extended case in which rows, branches, queries and pages are symbols."""

    def __init__(self, case):
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        args, options = case.arguments()
        pages = case.case.keys // case.page if case.page else 1
        hints = {
            "R": case.case.rows,
            "T": case.case.branches,
            "M": case.case.queries,
            "P": pages,
            "S": case.page or case.case.keys,
            "B": case.case.rows * pages + 2,
        }
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(hints))
        sizes = torch.empty(tuple(hints.values()), dtype=torch.int8)
        shape = self.mode.from_tensor(sizes, symbolic_context=context).shape
        self.size = dict(zip(hints, shape, strict=True))
        self.case, self.real = case, (args, options)
        self._guards = len(self.env.guards)

    def fake(self):
        """Fake args and options; N = R * T and L = P * S are products, as passes give them."""
        s, c = self.size, self.case.case
        n, keys = s["R"] * s["T"], s["P"] * s["S"] if self.case.page else s["S"]
        rows, held = (s["B"], s["S"]) if self.case.page else (s["R"], keys)
        letters = {"N": n, "H": c.size("H"), "M": s["M"], "L": keys, "1": 1}
        (q, k, v, mask), options = self.real
        with self.mode:

            def empty(like, *shape):
                return None if like is None else torch.empty(shape, dtype=like.dtype)

            args = (
                empty(q, n, c.size("H"), s["M"], c.dk),
                empty(k, rows, c.kv_heads, held, c.dk),
                empty(v, rows, c.kv_heads, held, c.dv),
                empty(mask, *(letters[x] for x in c.mask)),
            )
            shapes = {
                "q_positions": [letters[x] for x in c.positions],
                "kv_lens": [s["R"]],
                "page_table": [s["R"], s["P"]],
                "k_scale": [c.kv_heads],
                "v_scale": [c.kv_heads],
                "alibi_slopes": [c.size("H")],
            }
            tensors = {x: empty(options.get(x), *shape) for x, shape in shapes.items()}
        return args, {**options, **tensors, "branches": s["T"]}

    def new_guards(self):
        return [str(guard.expr) for guard in self.env.guards[self._guards :]]


@pytest.mark.parametrize("case", SYMBOLIC, ids=str)
def test_symbolic_sizes_add_no_guards(case):
    symbols = Symbols(case)
    args, options = symbols.fake()
    with symbols.mode:
        o, lse = ops.attend(*args, **options)
        for attend in (attend_cpu, attend_math):
            traced = attend(*args, **options)
            assert [x.dtype for x in traced] == [torch.float32] * 2
    assert o.is_contiguous()
    assert lse.is_contiguous()
    assert symbols.new_guards() == []


@both
@pytest.mark.parametrize("case", SYMBOLIC, ids=str)
def test_one_program_serves_other_sizes(attend, case):
    """Traced on symbols, run on other numbers of rows, branches, queries and pages."""
    symbols = Symbols(case)
    args, options = symbols.fake()
    names = [x for x, option in options.items() if isinstance(option, torch.Tensor)]
    rest = {x: option for x, option in options.items() if x not in (*names, "branches")}

    def flat(branches, *tensors):
        given = iter(tensors)
        positional = [None if a is None else next(given) for a in args]
        named = dict(zip(names, given, strict=True))
        return attend(*positional, branches=branches, **named, **rest)

    inputs = [a for a in args if a is not None] + [options[x] for x in names]
    with symbols.mode:
        program = make_fx(flat, tracing_mode="symbolic")(options["branches"], *inputs)
    other = case.but(
        rows=3, branches=2, queries=4, keys=24, lens=(20, 3, 0) if case.lens else (), hostile=NAN
    )
    for instance in (case, other):
        args_, options_ = instance.arguments()
        tensors = [a for a in args_ if a is not None] + [options_[x] for x in names]
        result = program(options_["branches"], *tensors)
        assert_attends(result, args_, options_)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_negative_page_names_no_block(compiled: bool) -> None:
    """Compiled code would count it from the end, and a matcher has counted from there already."""
    q, pool = torch.randn(1, 2, 1, 16), torch.randn(3, 2, 4, 16)
    run = torch.compile(ops.attend) if compiled else ops.attend
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        run(q, pool, pool, page_table=torch.tensor([[0, -1]]))
