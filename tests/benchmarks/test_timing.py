"""Who is timed when, and the kernel that measures the streaming read."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch

from torch_cascade.benchmarks import timing

pytest.importorskip("triton")


class Clock:
    """Stands for the device: remembers what it was asked to do; every entry takes a millisecond."""

    def __init__(self):
        self.asked = []

    def event(self, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, clock):
        self.clock = clock

    def record(self):
        self.at = len(self.clock.asked)

    def elapsed_time(self, end):
        return float(end.at - self.at)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return clock


def test_a_graph_keeps_what_it_reads_allocated(monkeypatch):
    """Engines make copies of the inputs in a layout of their own, which only the call refers to."""
    fakes = {name: lambda *_: nullcontext() for name in ("stream", "graph")}
    fakes |= {name: lambda *_: Stream() for name in ("Stream", "current_stream")}
    fakes |= {"synchronize": lambda *_: None, "CUDAGraph": Stream}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def engine():
        copy = torch.ones(3)
        return weakref.ref(copy), timing.prepare(lambda: copy * 2)

    copy, prepared = engine()
    assert copy() is not None
    del prepared
    assert copy() is None


class Stream:
    """Stands for a stream, and for a graph."""

    def wait_stream(self, other):
        pass

    def replay(self):
        pass


def test_engines_take_turns_each_after_a_flush(clock):
    ask = clock.asked.append
    engines = {
        "a": timing.Prepared(lambda: ask("a"), None),
        "b": timing.Prepared(lambda: (ask("b"), ask("b")), None),
    }
    times = timing.interleaved(engines, lambda: ask("flush"), 3)
    assert times == {"a": [1000.0] * 3, "b": [2000.0] * 3}
    timed = clock.asked[clock.asked.index("flush") :]
    turns = " ".join(timed).replace("b b", "b").removeprefix("flush ").split(" flush ")
    assert turns == ["a", "b", "b", "a", "a", "b"]
    assert Counter(timed)["flush"] == 6


def test_a_flush_reads_or_writes():
    read = timing.Flush("read", torch.device("cpu"), 64)
    write = timing.Flush("write", torch.device("cpu"), 64)
    for flush in (read, write):
        flush._buffer.fill_(2.0)
        flush()
    assert read._sum == 32.0 and (read._buffer == 2.0).all()
    assert (write._buffer == 1.0).all()
    timing.Flush("none", torch.device("cpu"), 64)()


def test_an_error_in_one_line():
    assert timing.first_line(ValueError("one\ntwo")) == "ValueError: one"
    assert timing.first_line(KeyError()) == "KeyError"
    said = timing.first_line(ValueError("backend raised:\n\nTypeError: no\nmore"))
    assert said == "ValueError: backend raised: TypeError: no"


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from torch_cascade.benchmarks import ceilings
from torch_cascade.benchmarks.read_kernel import read_block
aligned = [["tt.divisibility", 16]]
source = ASTSource(
    read_block,
    signature={"source": "*fp32", "partial": "*fp32", "BLOCK": "constexpr"},
    constexprs={"BLOCK": ceilings._BLOCK},
    attrs={(0,): aligned, (1,): aligned},
)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
print(compiled.asm["ptx"])
"""


def test_the_reading_kernel_compiles_to_wide_loads():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loads = [line for line in done.stdout.splitlines() if "ld.global" in line]
    assert loads and all(".v4.b32" in line for line in loads)
