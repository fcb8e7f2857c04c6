"""What every test starts from: the same seed, no switches set, nothing compiled."""

import os
import sys

# A cached artefact skips the passes under test. The tests of caching turn these on themselves.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

import pytest
import torch


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
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


def _same_machine(monkeypatch):
    """Decisions do not depend on the machine that runs the tests, nor on its calibration."""
    from support import machines

    from torch_cascade.compiler import calibration

    monkeypatch.setattr(calibration, "_table", machines.fixed)
    monkeypatch.setattr(calibration, "default_path", machines.uncalibrated)
