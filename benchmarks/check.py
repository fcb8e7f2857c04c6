"""Is an engine's result right? Judged by float64 and by what eager code gets wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# As the package's tests judge (tests/support/tolerance.py says why): twice eager's own error,
# since another order of summation rounds as much but not equally; and four roundings, for a row
# that eager gets exact by luck.
FACTOR = 2.0
ROUNDINGS = 4.0
MERGED = 0.5  # a merge rounds the partial outputs to the dtype once more


@dataclass(frozen=True)
class Verdict:
    """Errors of a result, relative to the reference, with what they may be.

    Attributes:
        error: of the whole, norm of the difference over norm of the reference.
        bound: twice eager's error of the same kind, and half a rounding.
        row_error: the largest of the last axis's vectors, relative to that vector's norm.
        row_bound: twice eager's, and four roundings.
        right: both errors are within their bounds, and all is finite.
    """

    error: float
    bound: float
    row_error: float
    row_bound: float
    right: bool

    def complaint(self) -> str:
        """What is wrong, in one line."""
        return (
            f"error {self.error:.1e} (bound {self.bound:.1e}), "
            f"worst row {self.row_error:.1e} (bound {self.row_bound:.1e})"
        )


def judge(actual: Tensor, eager: Tensor, reference: Tensor) -> Verdict:
    """Compare `actual` with `reference`, as accurate as may be, allowing what `eager` does.

    The norm over thousands of rows is never small by luck, so it has little allowance for that and
    finds a few dozen missing keys among thousands. The worst row finds a single wrong one.

    Raises:
        ValueError: shapes differ.
    """
    if not actual.shape == eager.shape == reference.shape:
        shapes = [list(t.shape) for t in (actual, eager, reference)]
        raise ValueError(f"actual, eager and reference differ in shape: {shapes}")
    error, row_error = _errors(actual, reference)
    eager_error, eager_row_error = _errors(eager, reference)
    eps = torch.finfo(actual.dtype).eps
    bound = FACTOR * eager_error + MERGED * eps
    row_bound = FACTOR * eager_row_error + ROUNDINGS * eps
    right = error <= bound and row_error <= row_bound  # False for NaN
    return Verdict(error, bound, row_error, row_bound, right)


def _errors(actual: Tensor, reference: Tensor) -> tuple[float, float]:
    difference = actual.to(reference.dtype) - reference
    norms = torch.linalg.vector_norm(reference, dim=-1)
    rows = torch.linalg.vector_norm(difference, dim=-1)
    whole = torch.linalg.vector_norm(rows) / torch.linalg.vector_norm(norms)
    return whole.item(), (rows / norms).max().item()
