"""Inductor takes the Triton kernels as they are: analysed, scheduled, copied and compiled by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "support" / "inductor_kernels.py"


def test_inductor_compiles_the_kernels():
    """Static sizes; symbolic ones that earlier calls have tied by guards; layers in a graph.

    And sizes that only data tells, which nothing can be guarded on.
    """
    variables = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    both = "attend_parts, merge_parts"
    assert done.stdout.splitlines() == [
        f"static: {both}",
        f"symbolic: {both}",
        f"symbolic: {both}",
        "symbolic: ",
        f"layers: {both}",
        f"linears: {both}, linears_tile",
        f"told by data: {both}",
        # One of the prefix's keys and one of the suffix's, not one a layer.
        "masks of three layers: 4, 67; 4, 71",
    ]
