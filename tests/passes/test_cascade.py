"""The cascade pass: golden graphs, decisions, guards, exactness where parts meet."""

# ruff: noqa: E501  (golden graphs)

from __future__ import annotations

from collections.abc import Callable, Sequence

import expecttest
import pytest
import torch
import torch.nn.functional as F
from support.backend import eager_cascade, last_compilation
from support.capture import joint_graph
from support.tolerance import assert_close_to_reference

from torch_cascade.compiler.backend import recent
from torch_cascade.compiler.capture import capture
from torch_cascade.compiler.graph import Sizes, show
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pass_base import PassContext
from torch_cascade.compiler.record import Compilation
from torch_cascade.compiler.report import Reason
from torch_cascade.passes.cascade import CascadePass

B, T, H, G, P, S, M, D = 2, 3, 5, 2, 11, 7, 4, 16
N = B * T

Attention = Callable[..., torch.Tensor]


def inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, prefix K and V, suffix K and V; with a needle in the last prefix key and in the suffix."""
    q = torch.randn(N, H * G, M, D)
    prefix_k, prefix_v = torch.randn(B, H, P, D), torch.randn(B, H, P, D)
    suffix_k, suffix_v = torch.randn(N, H, S, D), torch.randn(N, H, S, D)
    prefix_k[:, :, -1], prefix_v[:, :, -1] = q[::T, ::G, 0], 10.0
    suffix_k[:, :, S // 2], suffix_v[:, :, S // 2] = q[:, ::G, 1], -10.0
    return [x.to(dtype) for x in (q, prefix_k, prefix_v, suffix_k, suffix_v)]


def joined(prefix: torch.Tensor, suffix: torch.Tensor) -> torch.Tensor:
    times = suffix.shape[0] // prefix.shape[0]
    return torch.cat([prefix.repeat_interleave(times, 0), suffix], 2)


def attention(mask: torch.Tensor | None = None, **options: object) -> Attention:
    """SDPA over prefix and suffix."""

    def run(q, prefix_k, prefix_v, suffix_k, suffix_v):
        k, v = joined(prefix_k, suffix_k), joined(prefix_v, suffix_v)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **options)

    return run


def compiled(
    fn: Attention, values: Sequence[torch.Tensor], dynamic=None, **options
) -> torch.Tensor:
    torch._dynamo.reset()
    backend = eager_cascade(**{"decide": "always", "verify": True, **options})
    with torch.no_grad():
        return torch.compile(fn, backend=backend, dynamic=dynamic)(*values)


def check(fn: Attention, values: Sequence[torch.Tensor], **options: object) -> None:
    """The compiled function is as close to float64 as eager is, and was rewritten."""
    with torch.no_grad():
        actual, eager = compiled(fn, values, **options), fn(*values)
        reference = fn(*(v.double() if v.is_floating_point() else v for v in values))
    assert all(site.rewritten for site in last_compilation().sites), last_compilation().sites
    assert (actual.dtype, actual.stride()) == (eager.dtype, eager.stride())
    assert_close_to_reference(actual, eager, reference)


def only_site():
    (site,) = last_compilation().sites
    return site


class TestGolden(expecttest.TestCase):
    """The rewritten graph as a reader sees it."""

    def rewritten(self, fn: Attention, values: Sequence[torch.Tensor]) -> str:
        graph = joint_graph(fn, *values, prepare=capture).graph
        sizes = Sizes.of(graph, may_guard=True)
        CascadePass().apply(graph, PassContext(sizes, Options(decide="always"), Compilation()))
        graph.eliminate_dead_code()
        return show(graph)

    def test_request_prefix(self) -> None:
        self.assertExpectedInline(
            self.rewritten(attention(), inputs()),
            """\
%arg0: f32[6, 10, 4, 16]
%arg1: f32[2, 5, 11, 16]
%arg2: f32[2, 5, 11, 16]
%arg3: f32[6, 5, 7, 16]
%arg4: f32[6, 5, 7, 16]
%attend: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.attend(%arg0, %arg1, %arg2, None, branches=3, scale=None)
%getitem: f32[6, 10, 4, 16] = getitem(%attend, 0)
%getitem_1: f32[6, 10, 4] = getitem(%attend, 1)
%attend_1: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.attend(%arg0, %arg3, %arg4, None, branches=1, scale=None)
%getitem_2: f32[6, 10, 4, 16] = getitem(%attend_1, 0)
%getitem_3: f32[6, 10, 4] = getitem(%attend_1, 1)
%merge: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.merge([%getitem, %getitem_2], [%getitem_1, %getitem_3])
%getitem_4: f32[6, 10, 4, 16] = getitem(%merge, 0)
return [%getitem_4]""",
        )

    def test_causal_with_offset(self) -> None:
        def run(q, prefix_k, prefix_v, suffix_k, suffix_v):
            rows, keys = torch.arange(M)[:, None], torch.arange(P + S)[None]
            mask = keys <= rows + P + S - M
            return attention(mask)(q, prefix_k, prefix_v, suffix_k, suffix_v)

        self.assertExpectedInline(
            self.rewritten(run, inputs()),
            """\
%arg0: f32[6, 10, 4, 16]
%arg1: f32[2, 5, 11, 16]
%arg2: f32[2, 5, 11, 16]
%arg3: f32[6, 5, 7, 16]
%arg4: f32[6, 5, 7, 16]
%attend: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.attend(%arg0, %arg1, %arg2, None, branches=3, scale=None)
%getitem: f32[6, 10, 4, 16] = getitem(%attend, 0)
%getitem_1: f32[6, 10, 4] = getitem(%attend, 1)
%iota: i64[4] = iota(4, start=0, step=1, dtype=int64, device=cpu, requires_grad=False)
%add: i64[4] = add(%iota, 3)
%attend_1: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.attend(%arg0, %arg3, %arg4, None, branches=1, scale=None, q_positions=%add)
%getitem_2: f32[6, 10, 4, 16] = getitem(%attend_1, 0)
%getitem_3: f32[6, 10, 4] = getitem(%attend_1, 1)
%merge: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.merge([%getitem, %getitem_2], [%getitem_1, %getitem_3])
%getitem_4: f32[6, 10, 4, 16] = getitem(%merge, 0)
return [%getitem_4]""",
        )

    def test_tensor_mask(self) -> None:
        mask = torch.rand(N, 1, M, P + S) > 0.3

        def run(mask, *values):
            return attention(mask)(*values)

        self.assertExpectedInline(
            self.rewritten(run, [mask, *inputs()]),
            """\
%arg0: b8[6, 1, 4, 18]
%arg1: f32[6, 10, 4, 16]
%arg2: f32[2, 5, 11, 16]
%arg3: f32[2, 5, 11, 16]
%arg4: f32[6, 5, 7, 16]
%arg5: f32[6, 5, 7, 16]
%slice: b8[6, 1, 4, 11] = slice(%arg0, 3, 0, 11)
%attend: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.attend(%arg1, %arg2, %arg3, %slice, branches=3, scale=None)
%getitem: f32[6, 10, 4, 16] = getitem(%attend, 0)
%getitem_1: f32[6, 10, 4] = getitem(%attend, 1)
%slice_1: b8[6, 1, 4, 7] = slice(%arg0, 3, 11, 18)
%attend_1: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.attend(%arg1, %arg4, %arg5, %slice_1, branches=1, scale=None)
%getitem_2: f32[6, 10, 4, 16] = getitem(%attend_1, 0)
%getitem_3: f32[6, 10, 4] = getitem(%attend_1, 1)
%merge: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.merge([%getitem, %getitem_2], [%getitem_1, %getitem_3])
%getitem_4: f32[6, 10, 4, 16] = getitem(%merge, 0)
return [%getitem_4]""",
        )

    def test_repeat_order(self) -> None:
        def run(q, prefix_k, prefix_v, suffix_k, suffix_v):
            k = torch.cat([prefix_k.repeat(T, 1, 1, 1), suffix_k], 2)
            v = torch.cat([prefix_v.repeat(T, 1, 1, 1), suffix_v], 2)
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        self.assertExpectedInline(
            self.rewritten(run, inputs()),
            """\
%arg0: f32[6, 10, 4, 16]
%arg1: f32[2, 5, 11, 16]
%arg2: f32[2, 5, 11, 16]
%arg3: f32[6, 5, 7, 16]
%arg4: f32[6, 5, 7, 16]
%reshape: f32[3, 2, 10, 4, 16] = reshape(%arg0, [3, 2, 10, 4, 16])
%permute: f32[2, 3, 10, 4, 16] = permute(%reshape, [1, 0, 2, 3, 4])
%reshape_1: f32[6, 10, 4, 16] = reshape(%permute, [6, 10, 4, 16])
%attend: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.attend(%reshape_1, %arg1, %arg2, None, branches=3, scale=None)
%getitem: f32[6, 10, 4, 16] = getitem(%attend, 0)
%getitem_1: f32[6, 10, 4] = getitem(%attend, 1)
%reshape_2: f32[2, 3, 10, 4, 16] = reshape(%getitem, [2, 3, 10, 4, 16])
%permute_1: f32[3, 2, 10, 4, 16] = permute(%reshape_2, [1, 0, 2, 3, 4])
%reshape_3: f32[6, 10, 4, 16] = reshape(%permute_1, [6, 10, 4, 16])
%reshape_4: f32[2, 3, 10, 4] = reshape(%getitem_1, [2, 3, 10, 4])
%permute_2: f32[3, 2, 10, 4] = permute(%reshape_4, [1, 0, 2, 3])
%reshape_5: f32[6, 10, 4] = reshape(%permute_2, [6, 10, 4])
%attend_1: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.attend(%arg0, %arg3, %arg4, None, branches=1, scale=None)
%getitem_2: f32[6, 10, 4, 16] = getitem(%attend_1, 0)
%getitem_3: f32[6, 10, 4] = getitem(%attend_1, 1)
%merge: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.merge([%reshape_3, %getitem_2], [%reshape_5, %getitem_3])
%getitem_4: f32[6, 10, 4, 16] = getitem(%merge, 0)
return [%getitem_4]""",
        )

    def test_hand_written(self) -> None:
        def run(q, prefix_k, prefix_v, suffix_k, suffix_v):
            k = joined(prefix_k, suffix_k).repeat_interleave(G, 1)
            v = joined(prefix_v, suffix_v).repeat_interleave(G, 1)
            scores = (q @ k.transpose(-1, -2)) / D**0.5
            return torch.softmax(scores, -1) @ v

        self.assertExpectedInline(
            self.rewritten(run, inputs()),
            """\
%arg0: f32[6, 10, 4, 16]
%arg1: f32[2, 5, 11, 16]
%arg2: f32[2, 5, 11, 16]
%arg3: f32[6, 5, 7, 16]
%arg4: f32[6, 5, 7, 16]
%attend: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.attend(%arg0, %arg1, %arg2, None, branches=3, scale=0.25)
%getitem: f32[6, 10, 4, 16] = getitem(%attend, 0)
%getitem_1: f32[6, 10, 4] = getitem(%attend, 1)
%attend_1: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.attend(%arg0, %arg3, %arg4, None, branches=1, scale=0.25)
%getitem_2: f32[6, 10, 4, 16] = getitem(%attend_1, 0)
%getitem_3: f32[6, 10, 4] = getitem(%attend_1, 1)
%merge: (f32[6, 10, 4, 16], f32[6, 10, 4]) = cascade.merge([%getitem, %getitem_2], [%getitem_1, %getitem_3])
%getitem_4: f32[6, 10, 4, 16] = getitem(%merge, 0)
return [%getitem_4]""",
        )

    def test_symbolic_sizes(self) -> None:
        values = inputs()
        for value in values:
            torch._dynamo.mark_dynamic(value, 0)
            torch._dynamo.mark_dynamic(value, 2)
        self.assertExpectedInline(
            self.rewritten(attention(), values),
            """\
%arg0: s0
%arg1: s1
%arg2: f32[s2, 10, s3, 16]
%arg3: f32[s1, 5, s4, 16]
%arg4: f32[s1, 5, s4, 16]
%arg5: f32[s0, 5, s5, 16]
%arg6: f32[s6, 5, s5, 16]
%floordiv: (s0//s1) = floordiv(%arg0, %arg1)
%attend: (f32[s2, 10, s3, 16], f32[s2, 10, s3]) = cascade.attend(%arg2, %arg3, %arg4, None, branches=%floordiv, scale=None)
%getitem: f32[s2, 10, s3, 16] = getitem(%attend, 0)
%getitem_1: f32[s2, 10, s3] = getitem(%attend, 1)
%attend_1: (f32[s2, 10, s3, 16], f32[s2, 10, s3]) = cascade.attend(%arg2, %arg5, %arg6, None, branches=1, scale=None)
%getitem_2: f32[s2, 10, s3, 16] = getitem(%attend_1, 0)
%getitem_3: f32[s2, 10, s3] = getitem(%attend_1, 1)
%merge: (f32[s2, 10, s3, 16], f32[s2, 10, s3]) = cascade.merge([%getitem, %getitem_2], [%getitem_1, %getitem_3])
%getitem_4: f32[s2, 10, s3, 16] = getitem(%merge, 0)
return [%getitem_4]""",
        )

    def test_declined_graph_is_untouched(self) -> None:
        def run(q, _prefix_k, _prefix_v, suffix_k, suffix_v):
            return F.scaled_dot_product_attention(q, suffix_k, suffix_v, enable_gqa=True)

        compiled(run, inputs())
        assert last_compilation().before == last_compilation().after
        self.assertExpectedInline(
            str(only_site().declined),
            """no-shared-prefix at sdpa: K comes from arg1_1 (arg1_1) (expand the prefix inside the compiled function, or use SharedPrefixCache)""",
        )


def masks() -> dict[str, torch.Tensor]:
    """Masks of every broadcast shape, with rows masked in one part and in both."""
    padded = torch.ones(B, 1, 1, P + S, dtype=torch.bool)
    padded[1, :, :, : P // 2] = False
    full = torch.rand(N, H * G, M, P + S) > 0.4
    full[0, 0, 0] = False  # sees nothing
    full[1, 0, 0, :P] = False  # sees the suffix only
    full[2, 0, 0, P:] = False  # sees the prefix only
    tree = torch.ones(M, P + S, dtype=torch.bool)
    tree[:, P:] = torch.tril(torch.ones(M, S, dtype=torch.bool))
    bias = torch.randn(1, H * G, M, P + S)
    huge = torch.zeros(N, 1, M, P + S)
    huge[1], huge[2, :, :, P:] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    infinite = torch.zeros(N, 1, 1, P + S).masked_fill(torch.rand(N, 1, 1, P + S) > 0.6, -torch.inf)
    infinite[3] = -torch.inf
    return {
        "padding a request": padded.repeat_interleave(T, 0),
        "every dim": full,
        "tree": tree,
        "one key row": torch.rand(1, P + S) > 0.3,
        "bias a head": bias,
        "finfo.min rows": huge,
        "-inf rows": infinite,
        "broadcast keys": torch.rand(N, 1, M, 1) > 0.2,
    }


@pytest.mark.parametrize("name", masks())
def test_masks(name: str) -> None:
    mask = masks()[name]
    check(lambda mask, *values: attention(mask)(*values), [mask, *inputs()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes(dtype: torch.dtype, causal: bool) -> None:
    check(attention(is_causal=causal), inputs(dtype))


def test_transposed_query_keeps_its_strides() -> None:
    q, *rest = inputs()
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    check(lambda *v: attention()(*v).transpose(1, 2).view(N, M, -1), [q, *rest])


def test_value_heads_of_another_size() -> None:
    q, prefix_k, _, suffix_k, _ = inputs()
    values = [q, prefix_k, torch.randn(B, H, P, 24), suffix_k, torch.randn(N, H, S, 24)]
    check(attention(), values)


def test_scale_and_three_dims() -> None:
    q, prefix_k, prefix_v, suffix_k, suffix_v = (x[:, 0] for x in inputs())

    def run(q, prefix_k, prefix_v, suffix_k, suffix_v):
        k = torch.cat([prefix_k.repeat_interleave(T, 0), suffix_k], 1)
        v = torch.cat([prefix_v.repeat_interleave(T, 0), suffix_v], 1)
        return F.scaled_dot_product_attention(q, k, v, scale=0.3)

    check(run, [q, prefix_k, prefix_v, suffix_k, suffix_v])


def test_only_a_prefix() -> None:
    def run(q, prefix_k, prefix_v, _suffix_k, _suffix_v):
        k, v = (x.repeat_interleave(T, 0) for x in (prefix_k, prefix_v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    check(run, inputs())
    assert "merge" not in last_compilation().after


def test_fully_masked_softmax_stays_nan() -> None:
    mask = torch.ones(N, 1, M, P + S, dtype=torch.bool)
    mask[1, :, 2] = False

    def run(mask, q, prefix_k, prefix_v, suffix_k, suffix_v):
        k = joined(prefix_k, suffix_k).repeat_interleave(G, 1)
        v = joined(prefix_v, suffix_v).repeat_interleave(G, 1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
        return torch.softmax(scores, -1) @ v

    values = [mask, *inputs()]
    actual, eager = compiled(run, values), run(*values)
    assert only_site().rewritten
    assert torch.equal(actual.isnan(), eager.isnan()) and eager.isnan().any()


def test_one_branch_is_never_rewritten() -> None:
    q, prefix_k, prefix_v, suffix_k, suffix_v = inputs()
    values = [q[:B], prefix_k, prefix_v, suffix_k[:B], suffix_v[:B]]
    compiled(attention(), values)
    assert only_site().declined.reason is Reason.NO_SHARED_PREFIX


def long_inputs(prefix: int) -> list[torch.Tensor]:
    q, _, _, suffix_k, suffix_v = inputs()
    return [q, torch.randn(B, H, prefix, D), torch.randn(B, H, prefix, D), suffix_k, suffix_v]


def test_auto_declines_a_prefix_that_does_not_pay() -> None:
    compiled(attention(), long_inputs(P), decide="auto")
    assert only_site().declined.reason is Reason.NOT_PROFITABLE
    compiled(attention(), long_inputs(40 * P), decide="auto")
    assert only_site().rewritten


def test_never_analyses_and_reports() -> None:
    compiled(attention(), long_inputs(40 * P), decide="never")
    assert only_site().declined.reason is Reason.NEVER
    assert only_site().segments[0].rows == f"n // {T}"


def since(before: list[Compilation]) -> list[Compilation]:
    """What was compiled since: only so many records are kept, so their number says nothing."""
    return [record for record in recent() if all(record is not old for old in before)]


def test_the_break_even_is_one_guard_and_both_sides_stay() -> None:
    """Prefixes on one side share an artefact; crossing compiles the other side once."""
    torch._dynamo.reset()
    run = torch.compile(attention(), backend=eager_cascade(decide="auto"), dynamic=True)
    compiles = []
    with torch.no_grad():
        for prefix in (600, 700, 800, 13, 14, 900, 12):
            values = long_inputs(prefix)
            before = recent()
            assert torch.allclose(run(*values), attention()(*values), atol=1e-4)
            compiles.append(len(since(before)))
    assert compiles[1:3] == [0, 0] and compiles[4:] == [0, 0, 0], compiles
    assert compiles[3] >= 1 and not only_site().rewritten


def test_guards_never_decides_on_the_first_sizes() -> None:
    torch._dynamo.reset()
    backend = eager_cascade(decide="auto", guards="never")
    run = torch.compile(attention(), backend=backend, dynamic=True)
    with torch.no_grad():
        run(*long_inputs(600))
        before = recent()
        run(*long_inputs(13))
    assert not since(before) and only_site().decision.guard == ""


def test_a_growing_suffix_compiles_no_more_often_than_under_inductor() -> None:
    def compiles(backend) -> int:
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        torch._dynamo.reset()
        run = torch.compile(attention(), backend=counter)
        q, prefix_k, prefix_v, suffix_k, suffix_v = long_inputs(40)
        with torch.no_grad():
            for length in range(1, 12):
                suffix = (x.repeat(1, 1, 2, 1)[:, :, :length] for x in (suffix_k, suffix_v))
                run(q[:, :, :1], prefix_k, prefix_v, *suffix)
        return counter.frame_count

    assert compiles(eager_cascade(decide="always")) <= compiles("eager")


def hand_written(q, prefix_k, prefix_v, suffix_k, suffix_v):
    k = joined(prefix_k, suffix_k).repeat_interleave(G, 1)
    v = joined(prefix_v, suffix_v).repeat_interleave(G, 1)
    return torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1) @ v


def test_bodies_of_higher_order_ops_are_declined() -> None:
    """Found, reported, left alone; attention beside them is rewritten."""

    def run(*values):
        inside = torch.cond(values[0].sum() > 0, hand_written, lambda q, *_: q.clone(), values)
        return hand_written(*values) + inside

    values = inputs()
    assert torch.allclose(compiled(run, values), run(*values), atol=1e-4)
    body, beside = last_compilation().sites
    assert body.declined.reason is Reason.HIGHER_ORDER_BODY and "k.transpose" in body.where
    assert beside.rewritten


def test_bodies_with_several_call_sites_are_declined() -> None:
    region = torch.compiler.nested_compile_region(hand_written)

    def run(q, *values):
        return region(q, *values) + region(q * 2, *values)

    values = inputs()
    assert torch.allclose(compiled(run, values), run(*values), atol=1e-4)
    reasons = {site.declined.reason for site in last_compilation().sites}
    assert reasons <= {Reason.HIGHER_ORDER_BODY}


def test_suffixes_with_other_heads_are_not_joined() -> None:
    """One suffix is expanded to all heads and gathered by data, the other has the KV heads."""

    def run(order, q, prefix_k, prefix_v, suffix_k, suffix_v):
        def keys(prefix, suffix):
            wide = suffix.repeat_interleave(G, 1)[order]
            return torch.cat([joined(prefix, suffix).repeat_interleave(G, 1), wide], 2)

        k, v = keys(prefix_k, suffix_k), keys(prefix_v, suffix_v)
        return F.scaled_dot_product_attention(q, k, v)

    check(run, [torch.randperm(N), *inputs()])
