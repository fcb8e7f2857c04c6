"""Whether the pass chooses the rows that the oracle chooses by some metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from support.blend_models import Prompt, blended, expected, model_of
from support.tolerance import assert_close_to_reference

STAGES: Mapping[int, Any] = {1: "0.15"}


def assert_chooses(
    family: str,
    prompt: Prompt,
    metric: Any,
    stages: Mapping[int, Any] = STAGES,
    *,
    exact_metric: Any = None,
    **options: Any,
) -> list[list[int]]:
    """The pass blends as the oracle does with this metric; the rows.

    `exact_metric` is the metric in a float64 model, where it is another one.
    """
    got = blended(model_of(family), prompt, **options)
    eager, rows = expected(model_of(family), prompt, stages, metric=metric)
    model64 = model_of(family, torch.float64)
    exact, same = expected(model64, prompt.to(torch.float64), stages, metric=exact_metric or metric)
    assert rows == same, "choose another seed: float32 decides otherwise"
    assert_close_to_reference(got.logits, eager.logits, exact.logits)
    return rows
