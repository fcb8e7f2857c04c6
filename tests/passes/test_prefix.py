"""Segments: which KV row each batch row reads, through every way of writing it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.capture import joint_graph

from torch_cascade.compiler.capture import capture
from torch_cascade.compiler.graph import Sizes
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.attention import find_attention
from torch_cascade.passes.describe import describe_rows
from torch_cascade.passes.prefix import segments
from torch_cascade.passes.site import AttentionSite

# Pairwise distinct: equal sizes would share a symbol.
B, T, T1, T2, H, G, P, S, M, D = 2, 6, 2, 3, 5, 4, 11, 7, 3, 16
N = B * T
Tensors = dict[str, torch.Tensor]
Build = Callable[[Tensors, str], torch.Tensor]


def tensors() -> Tensors:
    """Prefixes (whole batch, a request, a group), suffix and query, K and V of each."""
    made = {"q": torch.randn(N, H, M, D)}
    for which in "kv":
        made |= {
            f"one_{which}": torch.randn(1, H, P, D),
            f"request_{which}": torch.randn(B, H, P, D),
            f"group_{which}": torch.randn(B * T1, H, P + 2, D),
            f"suffix_{which}": torch.randn(N, H, S, D),
            f"rows_{which}": torch.randn(B, P, H, D),
            f"stack_{which}": torch.randn(3, B, H, P, D),
            f"few_{which}": torch.randn(B, 1, P, D),
            f"buffer_{which}": torch.zeros(N, H, S + 6, D),
        }
    return made


def interleaved(x: torch.Tensor, times: int) -> torch.Tensor:
    return x[:, None].expand(-1, times, *x.shape[1:]).reshape(-1, *x.shape[1:])


def with_suffix(prefix: Callable[[Tensors, str], torch.Tensor]) -> Build:
    return lambda t, w: torch.cat([prefix(t, w), t[f"suffix_{w}"]], 2)


def resolved(
    build: Build, dynamic: bool | None = None, grouped: bool = False
) -> list[tuple[str, str, str]]:
    """(rows, branches, keys) of each segment that `build` gives for K and V."""
    found = found_segments(build, build, dynamic, grouped)
    assert not isinstance(found, Declined), found
    return [(describe_rows(s), str(s.branches), f"{s.start}+{s.length}") for s in found]


def found_segments(k: Build, v: Build, dynamic: bool | None = None, grouped: bool = False):
    names = sorted(tensors())

    def attention(*values: torch.Tensor) -> torch.Tensor:
        t = dict(zip(names, values, strict=True))
        query = t["q"].repeat(1, G, 1, 1) if grouped else t["q"]
        return F.scaled_dot_product_attention(query, k(t, "k"), v(t, "v"), enable_gqa=grouped)

    made = tensors()
    values = [made[name] for name in names]
    gm = joint_graph(attention, *values, dynamic=dynamic, prepare=capture)
    sizes = Sizes.of(gm.graph, may_guard=True)
    (site,) = find_attention(gm.graph, sizes)
    assert isinstance(site, AttentionSite), site
    return segments(site, sizes)


REQUEST = {
    "repeat_interleave": lambda t, w: t[f"request_{w}"].repeat_interleave(T, 0),
    "unsqueeze expand reshape": lambda t, w: interleaved(t[f"request_{w}"], T),
    "unsqueeze expand flatten": lambda t, w: (
        t[f"request_{w}"].unsqueeze(1).expand(-1, T, -1, -1, -1).flatten(0, 1)
    ),
    "index by an interleaved arange": lambda t, w: t[f"request_{w}"][
        torch.arange(B).repeat_interleave(T)
    ],
    "index_select by arange // T": lambda t, w: t[f"request_{w}"].index_select(
        0, torch.arange(N) // T
    ),
    "index by a constant": lambda t, w: t[f"request_{w}"][torch.tensor([0] * T + [1] * T)],
    "stack of copies on a new dim": lambda t, w: torch.stack([t[f"request_{w}"]] * T, 1).flatten(
        0, 1
    ),
    "transposed cache": lambda t, w: interleaved(t[f"rows_{w}"].transpose(1, 2), T),
    "expanded before it is transposed": lambda t, w: interleaved(t[f"rows_{w}"], T).transpose(1, 2),
    "a layer of a stacked cache": lambda t, w: interleaved(t[f"stack_{w}"][1], T),
    "unbound stacked cache": lambda t, w: interleaved(t[f"stack_{w}"].unbind(0)[2], T),
    "merged with the heads": lambda t, w: (
        interleaved(t[f"request_{w}"], T).reshape(N * H, P, D).clone().view(N, H, P, D)
    ),
    "contiguous clones": lambda t, w: interleaved(t[f"request_{w}"].clone(), T).contiguous(),
    "through float64 and back": lambda t, w: interleaved(t[f"request_{w}"].double(), T).float(),
    "repeat on a new dim": lambda t, w: (
        t[f"request_{w}"][:, None].repeat(1, T, 1, 1, 1).flatten(0, 1)
    ),
}


@pytest.mark.parametrize("spelling", REQUEST)
def test_one_prefix_a_request(spelling: str) -> None:
    rows = resolved(with_suffix(REQUEST[spelling]))
    assert rows == [(f"n // {T}", str(T), f"0+{P}"), ("n", "1", f"{P}+{S}")]


DYNAMIC = ["repeat_interleave", "unsqueeze expand reshape", "index_select by arange // T"]


@pytest.mark.parametrize("spelling", DYNAMIC)
def test_symbolic_sizes(spelling: str) -> None:
    (rows, branches, _), own = resolved(with_suffix(REQUEST[spelling]), dynamic=True)
    assert rows == f"n // {branches}" and branches != "1" and own[:2] == ("n", "1")


ONE = {
    "expand": lambda t, w: t[f"one_{w}"].expand(N, -1, -1, -1),
    "repeat": lambda t, w: t[f"one_{w}"].repeat(N, 1, 1, 1),
    "slice of a batch": lambda t, w: t[f"request_{w}"][1:].expand(N, -1, -1, -1),
    "select of a batch": lambda t, w: t[f"request_{w}"][1].expand(N, -1, -1, -1),
    "cat of copies": lambda t, w: torch.cat([t[f"one_{w}"]] * N, 0),
}


@pytest.mark.parametrize("spelling", ONE)
def test_one_prefix_for_the_batch(spelling: str) -> None:
    rows = resolved(with_suffix(ONE[spelling]))
    assert rows == [("0", str(N), f"0+{P}"), ("n", "1", f"{P}+{S}")]


def test_repeat_is_another_order_than_repeat_interleave() -> None:
    rows = resolved(with_suffix(lambda t, w: t[f"request_{w}"].repeat(T, 1, 1, 1)))
    assert rows[0] == (f"n % {B}", str(T), f"0+{P}")


def test_three_levels() -> None:
    def levels(t: Tensors, w: str) -> torch.Tensor:
        group = interleaved(t[f"group_{w}"], T2)
        inner = torch.cat([group, t[f"suffix_{w}"]], 2)
        return torch.cat([ONE["expand"](t, w), interleaved(t[f"request_{w}"], T), inner], 2)

    assert resolved(levels) == [
        ("0", str(N), f"0+{P}"),
        (f"n // {T}", str(T), f"{P}+{P}"),
        (f"n // {T2}", str(T2), f"{2 * P}+{P + 2}"),
        ("n", "1", f"{3 * P + 2}+{S}"),
    ]


def test_head_expansion_is_looked_through_and_shares_nothing() -> None:
    def grouped(x: torch.Tensor) -> torch.Tensor:
        n, h, k, d = x.shape
        return x[:, :, None].expand(n, h, G, k, d).reshape(n, h * G, k, d)

    assert resolved(lambda t, w: grouped(t[f"suffix_{w}"]), grouped=True) == [("n", "1", f"0+{S}")]
    shared = resolved(
        lambda t, w: grouped(with_suffix(REQUEST["repeat_interleave"])(t, w)), grouped=True
    )
    assert shared == [(f"n // {T}", str(T), f"0+{P}"), ("n", "1", f"{P}+{S}")]


def test_static_suffix_buffer_is_one_base() -> None:
    def written(t: Tensors, w: str) -> torch.Tensor:
        position = torch.arange(S)
        buffer = t[f"buffer_{w}"].index_copy(2, position, t[f"suffix_{w}"])
        return torch.cat([interleaved(t[f"request_{w}"], T), buffer], 2)

    assert resolved(written)[1] == ("n", "1", f"{P}+{S + 6}")


def test_a_cache_grown_by_cat_is_one_base() -> None:
    def grown(t: Tensors, w: str) -> torch.Tensor:
        suffix = torch.cat([t[f"suffix_{w}"], t[f"suffix_{w}"][:, :, 2:]], 2)
        return torch.cat([interleaved(t[f"request_{w}"], T), suffix], 2)

    assert resolved(grown)[1] == ("n", "1", f"{P}+{2 * S - 2}")


def test_slice_over_the_boundary_of_a_cat() -> None:
    rows = resolved(lambda t, w: with_suffix(REQUEST["repeat_interleave"])(t, w)[:, :, 4:-1])
    assert rows == [(f"n // {T}", str(T), f"0+{P - 4}"), ("n", "1", f"{P - 4}+{S - 1}")]


def test_stride_zero_input_is_one_row() -> None:
    prefix = torch.randn(1, H, P, D).expand(N, -1, -1, -1)
    query, suffix = torch.randn(N, H, M, D), torch.randn(N, H, S, D)

    def attention(q: torch.Tensor, p: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        keys = torch.cat([p, s], 2)
        return F.scaled_dot_product_attention(q, keys, keys)

    inputs = [query, prefix, suffix]
    gm = joint_graph(attention, *inputs, prepare=capture)
    sizes = Sizes.of(gm.graph)
    (site,) = find_attention(gm.graph, sizes)
    first, second = segments(site, sizes)
    assert (describe_rows(first), describe_rows(second)) == ("0", "n")


def row_permutation(t: Tensors, w: str) -> torch.Tensor:
    return t[f"request_{w}"][torch.tensor([0, 1] * 3 + [1, 0] * 3)]


NOT_SHARED = {
    "an irregular constant gather": row_permutation,
    "a gather by data": lambda t, w: t[f"request_{w}"][(t["q"][:, 0, 0, 0] > 0).long()],
    "changed after the expand": lambda t, w: interleaved(t[f"request_{w}"], T) * 2.0,
    "one branch overwritten": lambda t, w: interleaved(t[f"request_{w}"], T).index_fill(
        0, torch.tensor([3]), 0.5
    ),
    "heads expanded of a batch that is whole": lambda t, w: (
        t[f"few_{w}"].expand(-1, H, -1, -1).repeat_interleave(T, 0).add(0.0 if w == "k" else 1.0)
    ),
    "a rolled batch": lambda t, w: interleaved(t[f"request_{w}"], T).roll(1, 0),
}


@pytest.mark.parametrize("spelling", NOT_SHARED)
def test_not_shared(spelling: str) -> None:
    rows = resolved(with_suffix(NOT_SHARED[spelling]))
    assert all(branches == "1" for _, branches, _ in rows)


def test_key_values_of_different_maps_are_declined() -> None:
    tiled = with_suffix(lambda t, w: t[f"request_{w}"].repeat(T, 1, 1, 1))
    found = found_segments(with_suffix(REQUEST["repeat_interleave"]), tiled)
    assert isinstance(found, Declined) and found.reason is Reason.KV_MISMATCH


def test_key_values_cut_at_different_places_are_declined() -> None:
    def shorter(t: Tensors, w: str) -> torch.Tensor:
        prefix = interleaved(t[f"request_{w}"], T)
        return torch.cat([prefix[:, :, :-2], prefix[:, :, -2:], t[f"suffix_{w}"]], 2)

    found = found_segments(with_suffix(REQUEST["repeat_interleave"]), shorter)
    assert isinstance(found, Declined) and found.reason is Reason.KV_MISMATCH


def test_heads_tiled_instead_of_grouped_are_declined() -> None:
    tiled = with_suffix(REQUEST["repeat_interleave"])
    found = found_segments(*2 * (lambda t, w: tiled(t, w).repeat(1, G, 1, 1),), grouped=True)
    assert isinstance(found, Declined) and found.reason is Reason.LAYOUT
