"""Compile caches across processes: an artefact is used again exactly where it is still right.

Public faults of the kind: pytorch 160472, 144344, 187319 (a change of an op's code is not seen),
192042 and 177403 (two settings share an entry).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

SCRIPT = """
import json, sys
import torch
import torch_cascade
from torch._dynamo.utils import counters
from torch_cascade.compiler.backend import recent

def fn(q, kp, ks):
    k = torch.cat([kp.repeat_interleave(3, 0), ks], 2)
    return torch.nn.functional.scaled_dot_product_attention(q, k, k)

torch.manual_seed(0)
inputs = torch.randn(6, 2, 4, 16), torch.randn(2, 2, 9, 16), torch.randn(6, 2, 5, 16)
with torch.no_grad():
    out = torch.compile(fn, backend="cascade", options={"decide": sys.argv[1]})(*inputs)
caches = {"inductor": "fxgraph", "aot_autograd": "autograd"}
print(json.dumps({
    "package": torch_cascade.__file__,
    "error": (out - fn(*inputs)).abs().max().item(),
    "sum": out.double().sum().item(),
    "hits": sum(counters[k][f"{v}_cache_hit"] for k, v in caches.items()),
    "cached": recent()[-1].cached,
    "rewritten": counters["cascade"]["rewritten"],
}))
"""


def run(folder: Path, decide: str) -> dict[str, Any]:
    """One process with the package copy of `folder` and a cache of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    command = [sys.executable, "-c", SCRIPT, decide]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["package"] == str(folder / "torch_cascade" / "__init__.py")
    assert result["error"] <= 20 * torch.finfo(torch.float32).eps
    return result


def test_160472_192042_the_key_covers_sources_and_options(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    skip = shutil.ignore_patterns("tests", ".git", "build", "*.egg-info", ".*", "__pycache__")
    shutil.copytree(root, tmp_path / "torch_cascade", ignore=skip)
    cold = run(tmp_path, "always")
    assert not cold["hits"] and not cold["cached"] and cold["rewritten"] == 1
    warm = run(tmp_path, "always")
    assert warm["hits"] and warm["cached"]
    assert warm["sum"] == cold["sum"]
    other = run(tmp_path, "never")
    assert not other["hits"] and not other["rewritten"]
    with (tmp_path / "torch_cascade" / "kernels" / "merge.py").open("a") as source:
        source.write("\n# edited\n")
    edited = run(tmp_path, "always")
    assert not edited["hits"] and edited["rewritten"] == 1
