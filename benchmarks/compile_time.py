"""How much of the compile time the passes take: a deep model of small width, from cold caches.

    python -m torch_cascade.benchmarks.compile_time --layers 32 --dynamic

Width changes what kernels do, hardly what the compiler does, so a Llama of 32 narrow layers stands
for one of 32 layers. The model decodes one token for 8 branches of a shared prefix; every
attention is rewritten. All is compiled in this process and its children, and the share is one of
processor time, which other work on the machine changes less than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor import config as inductor
from transformers import LlamaConfig, LlamaForCausalLM

from torch_cascade import SharedPrefixCache, last_report
from torch_cascade.benchmarks.record import RESULTS
from torch_cascade.compiler.pipeline import Pipeline

BRANCHES = 8
COLD = inductor.patch(force_disable_caches=True, compile_threads=1)


def measure(layers: int, dynamic: bool | None) -> dict[str, Any]:
    """Compile the model once; the processor time of the passes and of the whole call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(1, 128, (1, 200))
    cache = SharedPrefixCache.prefill(model, prompt, branches=BRANCHES, max_suffix=32)
    always: dict[str, Any] = {"decide": "always"}
    compiled = torch.compile(model, backend="cascade", dynamic=dynamic, options=always)
    passes, run = [0.0], Pipeline.__call__

    def timed(self: Pipeline, graph: Any) -> None:
        begin = time.thread_time()
        run(self, graph)
        passes[0] += time.thread_time() - begin

    begin, wall = _processor_seconds(), time.perf_counter()
    with mock.patch.object(Pipeline, "__call__", timed), torch.no_grad(), COLD:
        compiled(prompt[:, -1:].expand(BRANCHES, 1), past_key_values=cache)
    total = _processor_seconds() - begin
    (record,) = last_report().compilations
    return {
        "layers": layers,
        "dynamic": dynamic,
        "rewritten": record.rewritten,
        "sites": len(record.sites),
        "processor_seconds": {"passes": passes[0], "call": total},
        "share": passes[0] / total,
        "wall_seconds": record.seconds | {"call": time.perf_counter() - wall},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def _processor_seconds() -> float:
    """Of this process and of its children that have ended, C++ compilers among them."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser("compile_time", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dynamic", action="store_true", help="every size symbolic")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/")
    given = parser.parse_args(arguments)
    measured = measure(given.layers, True if given.dynamic else None)
    kind = "dynamic" if given.dynamic else "static"
    path = given.json or RESULTS / f"compile-time-cpu-{given.layers}-layers-{kind}.json"
    path.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(measured, indent=1))
    print(f"the passes took {measured['share']:.1%} of the call that compiled")


if __name__ == "__main__":
    main()
