"""How wrong a result may be: judged by a float64 reference and by what eager code gets wrong.

No tolerance is picked by hand. With `err(x) = max |x - reference64|` over the whole tensor:

    err(actual) <= 2 * err(eager) + 4 * eps(dtype) * max |reference64|

First term: `actual` sums the same terms as eager code in another order. The rounding errors of two
orders are as large as each other but not equal, and a maximum over many elements varies little, so
twice eager's own maximum is generous to a right result. It still rejects a rounding to a shorter
dtype on the way (256 times the error, for bfloat16 inside float32) or a forgotten term.

Second term: eager may be exact by luck (one key, a one-hot softmax, powers of two) where splitting
the keys cannot be. Merging two parts rounds: each partial output (1/2 eps), each weight's division
and exponential (1 eps each), the product and the sum (1/2 eps each), the result (1/2 eps): 4 eps,
relative to the largest output, as weights are positive and sum to one.

A third term, where log-sum-exps are large (needles, scores in the hundreds):

    + eps(dtype) * max |lse| * max |reference64|

A stored lse_i is rounded by up to `eps/2 * |lse_i|`, which changes weight w_i by that much
relatively, and the output by at most `sum_i w_i |o_i - o| * eps/2 * |lse|`, which is not above
`eps/2 * |lse| * max |o|`; twice that, as a nested merge rounds once more. Eager has no such
rounding; it rounds its scores, and where few large ones decide, its maximum is one of few draws.
For ordinary scores the term drowns in the second, and callers leave it out. It concerns outputs,
never a log-sum-exp itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

FACTOR = 2.0
ROUNDINGS = 4.0


def max_error(actual: Tensor, reference64: Tensor) -> float:
    """Largest absolute error where both are finite; 0 for no such element."""
    error = (actual.double() - reference64).abs()
    finite = torch.isfinite(error)
    return error[finite].max().item() if finite.any() else 0.0


def error_bound(
    eager: Tensor, reference64: Tensor, dtype: torch.dtype, merged_lse: Tensor | None = None
) -> float:
    """The error that a result of `dtype` may have, see the module's text."""
    roundings = ROUNDINGS + (0.0 if merged_lse is None else _largest(merged_lse))
    rounding = torch.finfo(dtype).eps * _largest(reference64)
    return FACTOR * max_error(eager, reference64) + roundings * rounding


def fault(
    actual: Tensor, eager: Tensor, reference64: Tensor, merged_lse: Tensor | None = None
) -> str:
    """What is wrong with a result; "" if it is as close to the reference as eager code is.

    Args:
        actual: the result, of a floating dtype.
        eager: the same quantity computed by straightforward code in the dtype of the computation;
            where it is not finite but the reference is, it says nothing.
        reference64: the same quantity in float64. Its infinities and NaNs must be met exactly.
        merged_lse: the log-sum-exps, where large ones decide; else None.

    Returns:
        The error, its bound, and where the largest error is; or what is not finite and should be.

    Example:
        >>> import torch
        >>> exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> fault(exact.float(), exact.float(), exact)
        ''
        >>> fault(exact.float() + 1, exact.float(), exact)
        "error 1.000e+00 > bound 9.537e-07 (eager's error 0.000e+00) at (0,): 2.0 instead of 1.0"
    """
    special = ~torch.isfinite(reference64)
    wanted, got = reference64[special], actual[special].double()
    same = (wanted == got) | (wanted.isnan() & got.isnan())
    if not bool(same.all()):
        return f"expected {wanted[~same][:8].tolist()}, got {got[~same][:8].tolist()}"
    if not bool(torch.isfinite(actual[~special]).all()):
        return "not finite where the reference is"
    error, eager_error = max_error(actual, reference64), max_error(eager, reference64)
    bound = error_bound(eager, reference64, actual.dtype, merged_lse)
    if error <= bound:
        return ""
    deviation = (actual.double() - reference64).abs().masked_fill(special, 0.0)
    index = tuple(int(i) for i in torch.unravel_index(deviation.argmax(), deviation.shape))
    return (
        f"error {error:.3e} > bound {bound:.3e} (eager's error {eager_error:.3e}) "
        f"at {index}: {actual[index].item()} instead of {reference64[index].item()}"
    )


def _largest(x: Tensor) -> float:
    finite = x[torch.isfinite(x)]
    return finite.abs().max().item() if finite.numel() else 0.0
