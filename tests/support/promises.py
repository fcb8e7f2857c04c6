"""One call compiled by this package and held against eager code and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.backend import eager_cascade
from support.tolerance import assert_close_to_reference
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves, tree_map

Function = Callable[..., Any]


def tally() -> dict[str, int]:
    """The package's counters since the last `compiled`."""
    return dict(counters["cascade"])


def declined() -> set[str]:
    """The reasons among them."""
    return {k.removeprefix("declined.") for k in tally() if k.startswith("declined.")}


def compiled(fn: Function, dynamic: bool | None = False, **options: Any) -> Function:
    """`fn` under the whole product without code generation; starts the counters anew."""
    torch._dynamo.reset()
    counters["cascade"].clear()
    backend = eager_cascade(**{"decide": "always", "verify": True, **options})
    return torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)


def check_call(run: Function, fn: Function, *inputs: Any, exact: Function | None = None) -> None:
    """Assert that `run` answers as `fn` does: value, dtype, strides, and what it writes.

    Args:
        run: the compiled function.
        fn: the eager function.
        inputs: its inputs; each side gets copies.
        exact: the function to call with float64 inputs, where that is not `fn` itself.
    """
    eager_inputs, run_inputs = _copies(inputs), _copies(inputs)
    with torch.no_grad():
        expected = tree_leaves(fn(*eager_inputs))
        reference = tree_leaves((exact or fn)(*tree_map(_wide, _copies(inputs))))
        actual = tree_leaves(run(*run_inputs))
    for ours, eager, wide in zip(actual, expected, reference, strict=True):
        assert ours.dtype == eager.dtype
        assert ours.shape == eager.shape
        assert _strides(ours) == _strides(eager), (ours.stride(), eager.stride())
        assert_close_to_reference(ours, eager, wide.double())
    for ours, eager in zip(tree_leaves(run_inputs), tree_leaves(eager_inputs), strict=True):
        if isinstance(ours, Tensor):
            assert torch.equal(ours, eager), "an input was written differently"


def check(
    fn: Function,
    *inputs: Any,
    rewritten: int | None = 1,
    dynamic: bool | None = False,
    exact: Function | None = None,
    **options: Any,
) -> None:
    """Compile `fn`, check one call, and assert the number of sites rewritten (None: any)."""
    check_call(compiled(fn, dynamic, **options), fn, *inputs, exact=exact)
    assert "pass-failed" not in declined()
    if rewritten is not None:
        assert tally().get("rewritten", 0) == rewritten, tally()


def attend_shared(
    q: Tensor, kp: Tensor, ks: Tensor, vp: Tensor, vs: Tensor, mask: Any = None, **keywords: Any
) -> Tensor:
    """The pattern: a prefix a request, expanded to its branches; a suffix a branch."""
    t = q.shape[0] // kp.shape[0]
    k = torch.cat([kp.repeat_interleave(t, 0), ks], 2)
    v = torch.cat([vp.repeat_interleave(t, 0), vs], 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **keywords)


def shared_inputs(
    requests: int = 2,
    branches: int = 3,
    heads: int = 2,
    kv_heads: int | None = None,
    queries: int = 5,
    prefix: int = 7,
    suffix: int = 4,
    d: int = 16,
    dv: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """q, prefix K, suffix K, prefix V, suffix V, with needles.

    The last key of the prefix and the last of the suffix point along a query of a row that sees
    them and carry large values: what is lost or leaks there is seen in the output.
    """
    rows, kv, dv = requests * branches, kv_heads or heads, dv or d
    q = torch.randn(rows, heads, queries, d)
    kp, vp = torch.randn(requests, kv, prefix, d), torch.randn(requests, kv, prefix, dv)
    ks, vs = torch.randn(rows, kv, suffix, d), torch.randn(rows, kv, suffix, dv)
    for keys, values, share in ((kp, vp, branches), (ks, vs, 1)):
        if keys.shape[2]:
            pointed = q[::share, :: heads // kv, -1]
            keys[:, :, -1] = pointed * 4 * d**0.5 / pointed.square().sum(-1, keepdim=True)
            values[:, :, -1] = 10.0
    return [x.to(dtype) for x in (q, kp, ks, vp, vs)]


def _copies(inputs: Any) -> Any:
    """Copies with the same strides, so that a stride of 0 stays one."""
    return tree_map(_copy, inputs)


def _copy(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    storage = x.untyped_storage().clone()
    copy = torch.empty(0, dtype=x.dtype).set_(storage, x.storage_offset(), x.shape, x.stride())
    return copy


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _strides(x: Tensor) -> tuple[int, ...]:
    sizes = zip(x.shape, x.stride(), strict=True)
    return tuple(stride for size, stride in sizes if size > 1) if x.numel() else ()
