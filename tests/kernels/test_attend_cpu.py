"""`attend` against the float64 oracle, and what its traces may and may not contain."""

import math

import pytest
import torch
from support.attend_cases import BASE, GRID, assert_attends
from support.symbolic import SymbolicRows, allocations, trace
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_cascade.kernels import cpu_attend
from torch_cascade.kernels.cpu_attend import attend_cpu, attend_math

IMPLEMENTATIONS = [attend_cpu, attend_math]
both = pytest.mark.parametrize("attend", IMPLEMENTATIONS, ids=lambda f: f.__name__)


def test_the_grid_has_no_duplicates():
    assert len(set(GRID)) == len(GRID) > 100


@both
@pytest.mark.parametrize("case", GRID, ids=str)
def test_equals_the_oracle(attend, case):
    args, options = case.arguments()
    assert_attends(attend(*args, **options), args, options)


LAYOUTS = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "features-first": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": lambda x: torch.nn.functional.pad(x, (3, 1, 2, 2))[:, :, 2:-2, 3:-1],
    "every-second-feature": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda x: torch.cat([torch.randn(5), x.flatten()])[5:].view(x.shape),
    "expanded": lambda x: x[:1, :, :1].expand(x.shape),
}


@both
@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("operand", ["q", "k", "v", "mask"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(attend, layout, operand, branches):
    """The flash kernel reads q, k and v as if their last stride were 1; nobody may notice."""
    args, options = BASE.but(branches=branches, mask="NHML", additive=True).arguments()
    named = dict(zip(("q", "k", "v", "mask"), args, strict=True))
    named[operand] = LAYOUTS[layout](named[operand])
    args = tuple(named.values())
    assert_attends(attend(*args, **options), args, options)


@both
def test_a_finite_fill_is_no_mask(attend):
    """A row of finfo.min sees all its keys, equally: that is what the numbers say."""
    (q, k, v, _), options = BASE.arguments()
    mask = torch.zeros(5, 7)
    mask[1] = torch.finfo(torch.float32).min
    mask[2, :6] = torch.finfo(torch.float32).min
    args = (q, k, v, mask)
    assert_attends(attend(*args, **options), args, options)
    o, lse = attend(*args, **options)
    assert torch.isfinite(lse).all()
    torch.testing.assert_close(o[0, 0, 1], v[0, 0].mean(0))


@both
def test_nothing_of_a_hidden_key_remains(attend):
    """Huge keys and values behind a mask: padding of a cache holds anything."""
    (q, k, v, _), options = BASE.arguments()
    mask = torch.arange(7) < 6
    clean, loud_k, loud_v = v.clone(), k.clone(), v.clone()
    loud_k[:, :, 6], loud_v[:, :, 6], clean[:, :, 6] = 1e4, 1e6, 0.0
    o, lse = attend(q, loud_k, loud_v, mask, **options)
    expected_o, expected_lse = attend(q, k, clean, mask, **options)
    assert torch.equal(o, expected_o)
    assert torch.equal(lse, expected_lse)


@both
def test_results_are_nobody_elses_memory(attend):
    args, options = BASE.but(branches=1, group=1, mask="NHML", additive=True).arguments()
    before = [a.clone() for a in args]
    for result in attend(*args, **options):
        result.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_the_kernel_that_dies_on_nothing_is_not_called():
    """No query, or no key: the flash kernel divides by zero and takes the process with it."""
    for shape in ({"keys": 0}, {"queries": 0}, {"rows": 0}, {"keys": 0, "queries": 0}):
        args, options = BASE.but(**shape).arguments()
        o, lse = attend_cpu(*args, **options)
        assert o.abs().sum() == 0
        assert (lse == -math.inf).all()


# --- traces ---------------------------------------------------------------------------------------

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
TRACED = [
    BASE,
    BASE.but(branches=1),
    BASE.but(mask="N1ML"),
    BASE.but(mask="1HML", additive=True),
    BASE.but(mask="111L"),
    BASE.but(positions="NM", kv_start=2, window=3),
    BASE.but(positions="1M", mask="N11L", branches=1),
]
# So long that nothing else is as large as K or V.
LONG = 301


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", TRACED, ids=str)
def test_a_trace_has_one_kernel_and_no_copy_of_the_keys(case, symbolic):
    inputs = SymbolicRows(case.but(keys=LONG, dk=64, dv=64), symbolic)
    graph = trace(attend_cpu, inputs)
    assert [n.target for n in graph.nodes].count(FLASH) == 1
    keys = inputs.case.rows * inputs.case.kv_heads * LONG * 64
    assert {n.name: size for n, size in allocations(graph).items() if size >= keys} == {}
    assert inputs.new_guards() == []


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", [BASE, BASE.but(mask="N1ML"), BASE.but(softcap=3.0)], ids=str)
def test_the_formula_copies_no_keys_either(case, symbolic):
    inputs = SymbolicRows(case.but(keys=LONG, dk=64, dv=64, queries=1), symbolic)
    graph = trace(attend_math, inputs)
    keys = inputs.case.rows * inputs.case.kv_heads * LONG * 64
    assert {n.name: size for n, size in allocations(graph).items() if size >= keys} == {}
    assert inputs.new_guards() == []


def test_few_branches_read_grouped_heads_without_packing():
    graph = trace(attend_cpu, SymbolicRows(BASE.but(branches=1), symbolic=False))
    (call,) = graph.find_nodes(op="call_function", target=FLASH)
    assert call.args[0].op == "placeholder"


def test_positions_and_mask_become_one_tensor():
    case = BASE.but(positions="NM", mask="1HML", window=3)
    graph = trace(attend_cpu, SymbolicRows(case, symbolic=False))
    where = graph.find_nodes(op="call_function", target=torch.ops.aten.where.self)
    assert sum(n.meta["val"].dim() == 4 for n in where) == 1


@pytest.mark.parametrize(
    "change", [{"dv": 24}, {"softcap": 2.0}], ids=["other-value-size", "softcap"]
)
def test_what_the_kernel_cannot_do_is_the_formula(change):
    graph = trace(attend_cpu, SymbolicRows(BASE.but(**change), symbolic=True))
    assert FLASH not in {n.target for n in graph.nodes}


def test_a_key_count_that_may_be_zero_is_the_formula(monkeypatch):
    """A length of s - 3 is 0 for some s: one program must serve them all."""
    inputs = SymbolicRows(BASE.but(keys=9), symbolic=True, fewer_keys=3)
    formula = []
    monkeypatch.setattr(cpu_attend, "attend_math", lambda *args, **_: formula.append(args))
    with inputs.mode:
        inputs.call(attend_cpu, tuple(inputs.flat()))
    assert len(formula) == 1
    assert inputs.new_guards() == []


def test_one_program_serves_any_number_of_keys():
    """An unbacked length, which nothing is known about: 0 keys included."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with env.ignore_fresh_unbacked_symbols():
        keys = env.create_unbacked_symint()
    torch._check(keys >= 0)
    with mode:
        q, k, v = torch.empty(6, 6, 5, 16), torch.empty(2, 2, keys, 16), torch.empty(2, 2, keys, 16)
        mask = torch.empty(6, 1, 5, keys, dtype=torch.bool)
        program = make_fx(lambda *args: attend_cpu(*args, branches=3))(q, k, v, mask)
    assert FLASH not in {n.target for n in program.graph.nodes}
    assert env.guards == []
    for number in (0, 1, 9):
        args, options = BASE.but(keys=number, mask="N1ML", hidden_rows=True).arguments()
        assert_attends(program(*args), args, options)
