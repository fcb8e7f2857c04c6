"""What every test starts from: the same seed, no switches set, nothing compiled."""

import gc
import logging
import os
import sys

# A cached artefact skips the passes under test. The tests of caching turn these on themselves.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
# Sympy remembers 1,000 results a function, and a graph of symbolic sizes needs many times as many.
os.environ.setdefault("SYMPY_CACHE_SIZE", "100000")

import pytest
import torch

# Pytest listens to loggers that do not propagate, and torch makes its structured traces (the text
# of every graph) for whoever listens. `_traces_of_ours` has ours made, which the passes answer for.
if "TORCH_TRACE" not in os.environ:
    logging.getLogger("torch.__trace").handlers.clear()
    logging.getLogger("torch.__trace").propagate = True


def pytest_collection_finish():
    """Nothing imported dies: the collector need not look through half a million objects again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_collection_modifyitems(items):
    """Skip what needs a device that is not there."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _clean_slate(monkeypatch):
    for variable in [name for name in os.environ if name.startswith("TORCH_CASCADE_")]:
        monkeypatch.delenv(variable)
    _same_machine(monkeypatch)
    _traces_of_ours(monkeypatch)
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        # Torch measures what the guards of each compilation cost, for its traces: 30 ms.
        measure = "torch._dynamo.guards.profile_guard_manager"
        monkeypatch.setattr(measure, _at_no_cost, raising=False)


def _same_machine(monkeypatch):
    """Decisions do not depend on the machine that runs the tests, nor on its calibration."""
    from support import machines

    from torch_cascade.compiler import calibration

    monkeypatch.setattr(calibration, "_table", machines.fixed)
    monkeypatch.setattr(calibration, "default_path", machines.uncalibrated)


def _traces_of_ours(monkeypatch):
    """Every report and every graph of a test is written, though nobody reads it."""
    from torch_cascade.compiler import structured_trace

    monkeypatch.setattr(structured_trace, "_trace_structured", lambda: _made)


def _made(name, metadata, *, payload_fn):
    metadata()
    assert isinstance(payload_fn(), str)


def _at_no_cost(*_):
    return 0.0
