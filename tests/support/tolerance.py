"""The bound of `torch_cascade.compiler.tolerance` as an assertion."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_cascade.compiler.tolerance import error_bound, fault, max_error

__all__ = ["assert_close_to_reference", "error_bound", "max_error"]


def assert_close_to_reference(
    actual: Tensor, eager: Tensor, reference64: Tensor, *, merged_lse: Tensor | None = None
) -> None:
    """Assert that `actual` is as close to the float64 reference as eager code is.

    Args:
        actual: the result under test.
        eager: the same quantity computed by straightforward code in the dtype of the computation.
        reference64: the same quantity in float64.
        merged_lse: the log-sum-exps, where large ones decide; else None.

    Raises:
        AssertionError: with the error, its bound, and where the largest error is.
    """
    assert reference64.dtype == torch.float64
    assert actual.shape == reference64.shape == eager.shape, (actual.shape, reference64.shape)
    said = fault(actual, eager, reference64, merged_lse)
    assert not said, said
