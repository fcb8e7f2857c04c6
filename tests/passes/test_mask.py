"""What is proved of masks, what must not be, and every claim against the values of the mask."""

from __future__ import annotations

import random

import pytest
import sympy
import torch
from support.mask_draw import Draw, Drawn, draw_data
from support.mask_scenes import Dims, Scene

from torch_cascade.compiler.graph import shape
from torch_cascade.passes.mask import SegmentMask

DIMS = Dims()
OTHER_DIMS = [Dims(9, 6, 4, 6, 8), Dims(5, 2, 3, 17, 10), Dims(8, 8, 7, 4, 7)]
FMIN = "FMIN"


def scene(text: str, kind: str = "keep", symbolic: bool = False, **options) -> Scene:
    """The mask of an expression over sizes N H Q P S K and the tensors of `draw_data`."""
    data = draw_data(random.Random(0), options.get("dims", DIMS))
    used = {name: value for name, value in data.items() if name in text}
    return Scene(Drawn(text, kind).build, data=used, kind=kind, symbolic=symbolic, **options)


def check(asked: Scene, draws: int = 3) -> None:
    """Hold the claims about both segments, and about odd ones, against values."""
    rng = random.Random(1)
    p, s = asked.prefix, asked.suffix
    for dims in [asked.dims, *(OTHER_DIMS if asked.symbolic else [])]:
        for _ in range(draws if asked.data else 1):
            data = {k: v for k, v in draw_data(rng, dims).items() if k in asked.data}
            if not asked.admits(dims, data):
                continue
            values = asked.values(dims, data)
            for start, length in [(0, p), (p, s), (0, p + s), (1, p - 1), (p - 2, 3), (p, 0)]:
                values.check(start, length)


def is_causal(asked: Scene) -> bool:
    """Exactly: the prefix is seen by all, the suffix is causal, and no tensor is read."""
    return asked.on_prefix == SegmentMask(rows_see_a_key=True) and asked.on_suffix == SegmentMask(
        q_offset=sympy.Integer(0), rows_see_a_key=asked.on_suffix.rows_see_a_key
    )


# Spellings of one rule: key <= query + P. Each exercises an op of the registries.
KEY, QUERY = "ar(K)[None, :]", "ar(Q)[:, None]"
CAUSAL = [
    ("keep", f"{KEY} <= {QUERY} + P"),
    ("keep", f"{KEY} < {QUERY} + P + 1"),
    ("keep", f"{KEY} <= {QUERY} + ar(P, P + 1)[None, :]"),
    ("keep", f"{QUERY} + P >= {KEY}"),
    ("keep", f"{QUERY} > {KEY} - P - 1"),
    ("keep", f"{KEY} - {QUERY} <= P"),
    ("keep", f"{KEY} - P <= {QUERY}"),
    ("keep", f"-({QUERY}) <= P - {KEY}"),
    ("keep", f"torch.rsub({KEY}, P) >= -({QUERY})"),
    ("keep", f"torch.sub({KEY}, {QUERY}, alpha=2) <= P - {QUERY}"),
    ("keep", f"2 * {KEY} <= 2 * {QUERY} + 2 * P"),
    ("keep", "ar(K)[None, :] <= ar(P, P + Q)[:, None]"),
    ("keep", "ar(0, 2 * K, 2)[None, :] <= ar(Q)[:, None] * 2 + 2 * P"),
    ("keep", "ar(K).view(1, 1, 1, K) <= ar(Q).view(1, 1, Q, 1) + P"),
    ("keep", "ar(K).unsqueeze(0).unsqueeze(0)[:, None] <= (ar(Q) + P)[None, None, :, None]"),
    ("keep", "ar(K).expand(N, 1, Q, K) <= ar(Q)[:, None].expand(N, 1, Q, K) + P"),
    ("keep", "ar(K).repeat(Q, 1) <= ar(Q)[:, None].repeat(1, K) + P"),
    ("keep", "ar(K).repeat(N, H, Q, 1) <= ar(Q)[:, None] + P"),
    ("keep", "ar(K)[None, None].squeeze(0) <= ar(Q)[:, None] + P"),
    ("keep", "(ar(Q)[None, :] + P >= ar(K)[:, None]).T"),
    ("keep", "(ar(Q)[None, :] + P >= ar(K)[:, None]).permute(1, 0)"),
    ("keep", "ar(K)[None, :] <= ar(K)[P:P + Q, None]"),
    ("keep", "(ar(K)[None, :] <= ar(K)[:, None])[P:P + Q]"),
    ("keep", "(ar(K)[None, :] <= ar(2 * K)[:, None])[P : P + Q]"),
    ("keep", "torch.stack([ar(K), ar(K) + 1])[0][None] <= ar(Q)[:, None] + P"),
    ("keep", "ar(-K, K)[None, -K:] <= ar(Q)[:, None] + P"),
    ("keep", f"{KEY} <= {QUERY} + ar(P + 1)[-1]"),
    ("keep", f"{KEY} <= {QUERY} + ar(P + 1).select(0, -1)"),
    ("keep", "torch.ones(Q, K, dtype=torch.bool).tril(P)"),
    ("keep", "torch.tril(torch.ones(K, K, dtype=torch.bool))[P:P + Q, :]"),
    ("drop", "torch.ones(Q, K, dtype=torch.bool).triu(P + 1)"),
    ("drop", "torch.ones(Q, K).triu(diagonal=P + 1).bool()"),
    ("keep", "torch.ones(Q, K).triu(diagonal=P + 1) == 0"),
    ("keep", f"~({KEY} > {QUERY} + P)"),
    ("keep", f"torch.logical_not({KEY} > {QUERY} + P)"),
    ("drop", f"({KEY} <= {QUERY} + P) ^ True"),
    ("drop", f"({KEY} <= {QUERY} + P) == False"),
    ("keep", f"({KEY} <= {QUERY} + P) & ({KEY} >= 0)"),
    ("keep", f"torch.logical_and({KEY} <= {QUERY} + P, torch.ones(1, 1, dtype=torch.bool))"),
    ("keep", f"({KEY} <= {QUERY} + P) & ({KEY} <= {QUERY} + P + 2)"),
    ("keep", f"({KEY} <= {QUERY} + P) | ({KEY} < P)"),
    ("keep", f"({KEY} < P) | ({KEY} - P <= {QUERY})"),
    ("keep", f"torch.where({KEY} < P, True, {KEY} - P <= {QUERY})"),
    ("keep", f"({KEY} <= {QUERY} + P).to(torch.uint8).bool()"),
    ("keep", f"({KEY} <= {QUERY} + P).int() * ({KEY} >= 0).long() > 0"),
    ("keep", f"({KEY} <= {QUERY} + P).expand(N, H, Q, K).reshape(N * H, Q, K).view(N, H, Q, K)"),
    ("keep", f"({KEY} <= {QUERY} + P)[None, None].expand(N, 1, -1, -1).clone()"),
    ("keep", "torch.cat([torch.ones(Q, P), torch.ones(Q, S).tril()], 1) > 0"),
    ("keep", "F.pad(ar(S)[None, :] <= ar(Q)[:, None], (P, 0), value=True)"),
    ("keep", "torch.cat([torch.full((Q, P), -5), ar(S).expand(Q, S)], 1) <= ar(Q)[:, None]"),
    ("keep", f"({KEY} - {QUERY} - P).clamp(min=-1) <= 0"),
    ("keep", f"torch.maximum({KEY}, {QUERY}) <= {QUERY} + P"),
    ("keep", f"torch.minimum({KEY}, torch.tensor(10**6)) <= {QUERY} + P"),
    ("keep", "(ar(2 * K)[None, :K] <= ar(Q)[:, None] + P)"),
    ("keep", "(ar(K)[ar(K)] <= (ar(Q) + P)[:, None])"),
    ("keep", "(ar(K).expand(N, K)[ar(N)[:, None, None], ar(K)][:, None] <= (ar(Q) + P)[:, None])"),
    ("keep", "(ar(K)[None, :] <= ar(Q)[:, None] + P) & (ar(N)[:, None, None, None] < N)"),
    ("keep", "torch.ones(Q, K, dtype=torch.bool).slice_scatter(torch.ones(Q, S).tril() > 0, 1, P)"),
    ("keep", "torch.ones(Q, K).tril(P).select_scatter(torch.ones(Q), 1, 0) > 0"),
    ("keep", "torch.cat(torch.ones(Q, K, dtype=torch.bool).tril(P).split([P, S], 1), 1)"),
    ("keep", "(K - 1 - ar(K).flip(0))[None, :] <= ar(Q)[:, None] + P"),
    ("keep", "ar(K).expand(2, K).unbind(0)[1][None] <= ar(Q)[:, None] + P"),
    ("add", f"torch.where({KEY} <= {QUERY} + P, 0.0, -inf)"),
    ("add", f"torch.where({KEY} > {QUERY} + P, -inf, 0.0)"),
    ("add", f"torch.where({KEY} <= {QUERY} + P, torch.tensor(0.0), torch.tensor(-inf))"),
    ("add", f"torch.where({KEY} <= {QUERY} + P, 0.0, FMIN)"),
    ("add", f"torch.where({KEY} <= {QUERY} + P, 0.0, -1e9)"),
    ("add", f"torch.zeros(Q, K).masked_fill({KEY} > {QUERY} + P, -inf)"),
    ("add", f"torch.zeros(Q, K).masked_fill(~({KEY} <= {QUERY} + P), FMIN)"),
    ("add", f"(1.0 - ({KEY} <= {QUERY} + P).float()) * FMIN"),
    ("add", f"({KEY} > {QUERY} + P) * FMIN"),
    ("add", f"torch.where({KEY} <= {QUERY} + P, 0.0, FMIN).double() * 2"),
    ("add", f"torch.where({KEY} <= {QUERY} + P, 0.0, -inf).to(torch.bfloat16)"),
    ("add", f"({KEY} > {QUERY} + P).to(torch.bfloat16) * torch.tensor(-1e38)"),
    ("add", "torch.full((Q, K), -inf).triu(P + 1)"),
    ("add", "torch.full((Q, K), FMIN).triu(1) * (ar(K)[None, :] > ar(Q)[:, None] + P)"),
    ("add", f"({KEY} <= {QUERY} + P).float().log()"),
    ("add", f"torch.where({KEY} <= {QUERY} + P, 0.0, -inf) + torch.zeros(1, K)"),
]


@pytest.mark.parametrize("kind, text", CAUSAL)
def test_every_spelling_of_the_causal_rule_is_read(kind, text):
    asked = scene(text, kind)
    assert is_causal(asked)
    assert asked.on_suffix.rows_see_a_key
    assert asked.reader.describe(asked.site) == "k <= q + 11"
    check(asked)


SYMBOLIC = [
    ("keep", f"{KEY} <= {QUERY} + P"),
    ("keep", "(ar(K)[None, :] <= ar(K)[:, None])[P:P + Q]"),
    ("keep", "torch.ones(Q, K, dtype=torch.bool).tril(P)"),
    ("keep", f"({KEY} < P) | ({KEY} - P <= {QUERY})"),
    ("keep", "F.pad(ar(S)[None, :] <= ar(Q)[:, None], (P, 0), value=True)"),
    ("keep", f"({KEY} <= {QUERY} + P)[None, None].expand(N, H, -1, -1).reshape(N, H, Q, K)"),
    ("add", f"torch.where({KEY} <= {QUERY} + P, 0.0, FMIN)"),
    ("add", "torch.full((Q, K), -inf).triu(P + 1)"),
    ("add", f"(1.0 - ({KEY} <= {QUERY} + P).float()) * FMIN"),
]


@pytest.mark.parametrize("kind, text", SYMBOLIC)
def test_the_causal_rule_is_read_with_symbolic_sizes(kind, text):
    asked = scene(text, kind, symbolic=True)
    assert is_causal(asked)
    check(asked)


TREE = [
    "torch.zeros(Q, K).slice_scatter(torch.ones(Q, P), 1, 0, P).slice_scatter(dqs * 1.0, 1, P) > 0",
    "torch.cat([torch.ones(Q, P, dtype=torch.bool), dqs], -1)",
    "torch.cat([dqs.new_ones(Q, P), dqs], -1)[None, None].expand(N, 1, Q, K)",
    "F.pad(dqs, (P, 0), value=True)",
    "F.pad(~dqs, (P, 0), value=False) == False",
]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("text", TREE)
def test_a_tree_mask_reads_no_tensor_on_the_prefix(text, symbolic):
    asked = scene(text, symbolic=symbolic)
    assert asked.on_prefix == SegmentMask(rows_see_a_key=True)
    assert len(asked.on_suffix.terms) == 1 and asked.on_suffix.q_offset is None
    assert not asked.on_suffix.rows_see_a_key
    assert asked.reader.finite(asked.site)
    check(asked)


def test_an_additive_tree_mask_is_read_as_the_bool_mask_it_is_made_of():
    mask = "torch.cat([torch.ones(Q, P, dtype=torch.bool), dqs], -1)"
    asked = scene(f"torch.where({mask}, 0.0, FMIN)[None, None].expand(N, 1, Q, K)", "add")
    (term,) = asked.on_suffix.terms
    assert term.kind == "keep" and term.node.meta["val"].shape == (3, 16)
    check(asked)


@pytest.mark.parametrize("symbolic", [False, True])
def test_padding_stays_a_tensor_beside_a_causal_bound(symbolic):
    asked = scene(f"({KEY} <= {QUERY} + P) & dnk[:, None, None, :]", symbolic=symbolic)
    for claim, offset in ((asked.on_prefix, None), (asked.on_suffix, 0)):
        (term,) = claim.terms
        assert claim.q_offset == offset and term.kind == "keep" and not claim.rows_see_a_key
        assert [d == 1 for d in shape(term.node)] == [False, True, True, False]
    assert not asked.reader.sees_a_key(asked.site)
    check(asked)


@pytest.mark.parametrize("window", [1, 4, 13, 14, 40])
def test_a_window_is_exact(window):
    asked = scene(f"({KEY} <= {QUERY} + P) & ({KEY} > {QUERY} + P - {window})")
    prefix, suffix = asked.on_prefix, asked.on_suffix
    assert not prefix.terms and not suffix.terms
    # Queries are at 11 to 13: the last sees key 0 iff the window is 14, the first key 10 iff 2.
    assert prefix.hidden == (window == 1)
    assert prefix.window == (window if 1 < window < 14 else None)
    assert suffix.q_offset == 0 and suffix.rows_see_a_key
    check(asked)


def test_a_window_keeps_its_offset_with_symbolic_sizes():
    asked = scene(f"({KEY} <= {QUERY} + P) & ({KEY} > {QUERY} + P - 8)", symbolic=True)
    assert (asked.on_prefix.q_offset, asked.on_prefix.window) == (asked.prefix, 8)
    assert (asked.on_suffix.q_offset, asked.on_suffix.window) == (0, 8)
    check(asked)


def test_a_window_without_a_causal_rule_needs_no_tensor():
    asked = scene(f"{KEY} > {QUERY} + 4")
    assert not asked.on_prefix.terms and asked.on_prefix.window is not None
    check(asked)


def test_a_segment_that_nobody_sees_is_hidden():
    asked = scene(f"{KEY} >= P")
    assert asked.on_prefix.hidden and not asked.on_prefix.rows_see_a_key
    assert asked.on_suffix == SegmentMask(rows_see_a_key=True)
    check(asked)


def test_torchs_causal_rule_is_top_left():
    asked = scene("torch.ones(1, 1, dtype=torch.bool)", is_causal=True)
    assert asked.on_prefix == SegmentMask(q_offset=sympy.Integer(0), rows_see_a_key=True)
    assert asked.on_suffix.hidden  # query 2 is the last, the suffix starts at key 11
    check(asked)


def test_torchs_causal_rule_and_a_mask_join():
    asked = scene("dnk[:, None, None, :]", is_causal=True, dims=Dims(6, 4, 16, 11, 5))
    assert asked.on_prefix.q_offset == 0 and asked.on_suffix.q_offset == -11
    assert len(asked.on_prefix.terms) == 1 and not asked.on_prefix.rows_see_a_key
    check(asked)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("widths", [(4, 8), (8, 4)])
def test_the_tighter_bound_of_two_masks_holds(widths, symbolic):
    near, far = widths
    causal = f"({KEY} <= {QUERY} + P + {far - near})"
    windows = [f"({KEY} > {QUERY} + P - {width})" for width in widths]
    asked = scene(f"{windows[0]}, {KEY} <= {QUERY} + P, {windows[1]}, {causal}", symbolic=symbolic)
    for claim in (asked.on_prefix, asked.on_suffix):
        assert not claim.terms
        if claim.window is not None:
            assert claim.window == min(4, 4 + far - near)
    check(asked)


def test_bounds_that_cannot_be_compared_are_not_joined():
    asked = scene(f"{KEY} <= {QUERY} + P, {KEY} <= {QUERY} + S + 3", symbolic=True)
    claim = asked.claim(0, asked.prefix + asked.suffix)
    assert claim.q_offset == asked.prefix and [t.node for t in claim.terms] == [asked.masks[1]]
    check(asked)


def test_masks_that_hide_everything_together_hide_the_segment():
    asked = scene(f"{KEY} <= {QUERY} + 2, {KEY} > {QUERY} + 2")
    assert asked.on_prefix.hidden and asked.on_suffix.hidden
    check(asked)


BOUNDED = [
    "t0.clamp(min=0)",
    "t0.clamp_min(0)",
    "t0.abs()",
    "t0.clamp(0, 5)",
    "t0.clamp(min=0).clamp(min=-5)",
    "t0.clamp(min=-5).clamp(min=0)",
    "torch.maximum(t0, torch.tensor(0))",
    "torch.maximum(torch.tensor(0), t0)",
    "tn.clamp(min=0)[:, None, None, None]",
    "torch.minimum(t0.abs(), torch.tensor(4))",
]


@pytest.mark.parametrize("offset", BOUNDED)
def test_data_with_a_lower_bound_proves_the_prefix(offset):
    asked = scene(f"{KEY} <= {QUERY} + P + {offset}")
    assert asked.on_prefix == SegmentMask(rows_see_a_key=True)
    assert len(asked.on_suffix.terms) == 1 and asked.on_suffix.q_offset is None
    check(asked, draws=6)


def test_data_with_a_lower_bound_proves_a_symbolic_prefix():
    asked = scene(f"{KEY} <= {QUERY} + P + t0.clamp(min=0)", symbolic=True)
    assert asked.on_prefix == SegmentMask(rows_see_a_key=True)
    check(asked, draws=6)


# Look-alikes: (kind, mask). The prefix is not proved visible, whatever else is said must be true.
NOT_VISIBLE = [
    ("keep", f"{KEY} <= {QUERY} + P - 2"),
    ("keep", f"{KEY} < {QUERY} + P - 1"),
    ("keep", f"{KEY} <= {QUERY}"),
    ("drop", f"{KEY} <= {QUERY} + P"),
    ("keep", f"{KEY} > {QUERY} + P"),
    ("keep", f"{KEY} != {QUERY} + P - 1"),
    ("keep", f"{KEY}.float() <= {QUERY}.float() + P"),
    ("keep", f"{KEY} <= {QUERY} + P + 0.5"),
    ("keep", f"{KEY} <= {QUERY} + P + t0"),
    ("keep", f"{KEY} <= {QUERY} + P + t0.clamp(max=0)"),
    ("keep", f"{KEY} <= {QUERY} + P - t0.clamp(min=0)"),
    ("keep", f"{KEY} <= {QUERY} + P + t0.clamp(min=-2)"),
    ("keep", f"{KEY} <= {QUERY} + P + t0 * 2"),
    ("keep", f"{KEY} < tn[:, None, None, None]"),
    ("keep", f"{KEY} + 6 * ar(N)[:, None, None, None] < P"),
    ("keep", f"{KEY} - ar(H)[None, :, None, None] >= 0"),
    ("keep", f"({KEY}.to(torch.uint8) - 1) < P"),
    ("keep", f"({KEY}.to(torch.int8) * 20) >= 0"),
    ("keep", f"({KEY}.to(torch.uint8) - 1).long() < P"),
    ("keep", f"ar(K)[ar(K) - P][None, :] <= {QUERY} + P"),
    ("keep", "ar(P).repeat(2)[None, :K] < P"),
    ("keep", f"({KEY} + (2**63 - 10)) >= 0"),
    ("keep", "ar(K, dtype=torch.int32)[None, :] <= t0.clamp(min=2**32, max=2**32)"),
    ("keep", "ar(K, dtype=torch.int8)[None, :] <= torch.tensor(2**8)"),
    ("keep", f"({KEY} // 4) <= 1"),
    ("keep", f"({KEY} % 4) < 3"),
    ("keep", f"{KEY}.flip(-1) <= {QUERY} + P - 3"),
    ("keep", f"torch.sort({KEY}, -1, descending=True)[0] <= {QUERY} + P"),
    ("keep", f"{KEY}.cumsum(-1) <= {QUERY} + P"),
    ("keep", f"{KEY}.roll(1, -1) < P"),
    ("keep", "dqk"),
    ("keep", "dqk | dnk[:, None, None, :]"),
    ("keep", "dn[:, None, None, None]"),
    ("keep", "torch.empty(Q, K).bool()"),
    ("keep", "torch.rand(Q, K) < 2"),
    ("keep", "torch.cat([torch.zeros(Q, P, dtype=torch.bool), dqs], -1)"),
    ("keep", "torch.cat([dqs, torch.ones(Q, P, dtype=torch.bool)], -1)"),
    ("keep", "F.pad(dqs, (P, 0), value=False)"),
    ("keep", "F.pad(dqs, (0, P), value=True)"),
    ("keep", f"({KEY} <= {QUERY} + P) & ({KEY} > {QUERY} + P - 13)"),
    ("add", f"torch.where({KEY} <= {QUERY} + P, -inf, 0.0)"),
    ("add", f"torch.where({KEY} <= {QUERY} + P, -1.0, -inf)"),
    ("add", f"torch.where({KEY} <= {QUERY} + P, 1.0, 0.0)"),
    ("add", "torch.full((Q, K), -1.0)"),
    ("add", "torch.full((Q, K), 1e-30)"),
    ("add", "dqk.float()"),
    ("add", f"torch.where({KEY} <= {QUERY} + P, dqk.float(), -inf)"),
    ("add", f"0.5 * ({KEY} - {QUERY})"),
    ("add", f"({KEY} <= {QUERY} + P).float()"),
    ("add", f"(({KEY} <= {QUERY} + P).float() - 1) * inf"),
]


@pytest.mark.parametrize("kind, text", NOT_VISIBLE)
def test_a_look_alike_is_not_taken_for_visible(kind, text):
    asked = scene(text, kind)
    claim = asked.on_prefix
    assert claim.hidden or claim.terms or claim.q_offset is not None
    assert asked.on_prefix.hidden or not is_causal(asked)
    check(asked, draws=5)


@pytest.mark.parametrize("fill", ["FMIN", "-1e9", "-1e30"])
def test_a_finite_fill_is_a_tensor_where_a_row_may_see_nothing(fill):
    text = f"torch.where(({KEY} <= {QUERY} + P) & dnk[:, None, None, :], 0.0, {fill})"
    asked = scene(text, "add")
    for claim in (asked.on_prefix, asked.on_suffix):
        assert [t.node for t in claim.terms] == [asked.mask] and claim.q_offset is None
    assert not asked.reader.finite(asked.site)
    check(asked)


@pytest.mark.parametrize(
    "fill, finite", [("-inf", True), ("-1e4", True), ("-1e9", False), ("FMIN", False)]
)
def test_only_huge_finite_values_are_not_finite(fill, finite):
    asked = scene(f"torch.where({KEY} < t0, 0.0, {fill})", "add")
    assert asked.reader.finite(asked.site) is finite


def test_unknown_added_values_are_not_finite():
    asked = scene("tn.float()[:, None, None, None]", "add")
    assert not asked.reader.finite(asked.site)


def test_a_small_finite_value_never_hides():
    asked = scene(f"torch.where({KEY} <= {QUERY} + P, 0.0, -1e4)", "add")
    assert asked.on_prefix == SegmentMask(rows_see_a_key=True)
    assert [t.node for t in asked.on_suffix.terms] == [asked.mask]
    check(asked)


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_a_bool_mask_with_a_finite_fill_hides_only_where_rows_see_a_key(fill):
    seen = scene(f"{KEY} <= {QUERY} + P", fill=fill)
    assert seen.on_prefix == SegmentMask(rows_see_a_key=True)
    assert bool(seen.on_suffix.terms) == (fill == -1e4)
    unseen = scene(f"{KEY} < t0", fill=fill)
    assert [t.node for t in unseen.on_suffix.terms] == [unseen.mask]
    hidden = scene(f"{KEY} < 0", fill=fill)
    assert not hidden.on_prefix.hidden
    for asked in (seen, unseen, hidden):
        check(asked)


def test_a_mask_with_one_key_is_a_term():
    asked = scene("dn[:, None, None, None]")
    for claim in (asked.on_prefix, asked.on_suffix):
        assert [t.node.meta["val"].shape[-1] for t in claim.terms] == [1]


def test_one_query_and_one_row():
    asked = scene(f"{KEY} <= {QUERY} + P", dims=Dims(1, 4, 1, 11, 5))
    assert is_causal(asked)
    check(asked)


@pytest.mark.parametrize("mask_dtype", [torch.uint8, torch.int64])
def test_a_mask_of_another_dtype_is_a_term(mask_dtype):
    asked = scene(f"({KEY} <= {QUERY} + P).to(torch.{str(mask_dtype).split('.')[1]})")
    assert [t.node for t in asked.on_prefix.terms] == [asked.mask]


def test_very_deep_and_very_wide_masks_are_terms():
    deep = "(dqk & ~dqk)" + ".logical_not()" * 300
    wide = " ^ ".join(f"({KEY} * {i} <= {QUERY} + t0 * {i})" for i in range(1, 12))
    for text in (deep, wide):
        asked = scene(text)
        assert asked.on_prefix.terms
        check(asked)


def test_each_mask_is_read_once():
    asked = scene(f"{KEY} <= {QUERY} + P", symbolic=True)
    assert asked.on_prefix.rows_see_a_key
    read = len(asked.reader._read.memo)
    assert asked.on_suffix.q_offset == 0 and len(asked.reader._read.memo) == read


@pytest.mark.parametrize("block", range(6))
def test_random_masks(block):
    for seed in range(block * 20, block * 20 + 20):
        rng = random.Random(seed)
        dims = Dims(rng.choice([6, 7]), rng.choice([2, 4]), rng.choice([1, 3, 5]), 11, 8)
        _check_random(rng, dims, symbolic=False)


@pytest.mark.parametrize("seed", range(1000, 1008))
def test_random_masks_with_symbolic_sizes(seed):
    _check_random(random.Random(seed), DIMS, symbolic=True)


def _check_random(rng: random.Random, dims: Dims, symbolic: bool) -> None:
    drawn = Draw(rng).mask()
    if rng.random() < 0.3:
        drawn = Drawn(f"{drawn.text}, {Draw(rng).mask_of(drawn.kind)}", drawn.kind)
    data = {k: v for k, v in draw_data(rng, dims).items() if k in drawn.text}
    options = {"symbolic": symbolic, "is_causal": rng.random() < 0.1}
    try:
        check(Scene(drawn.build, dims, data, drawn.kind, **options), draws=2)
    except AssertionError as error:
        raise AssertionError(f"{drawn.kind}: {drawn.text}") from error
