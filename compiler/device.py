"""What a device can do: figures with units and sources.

They come from `compiler/device_table.py` or from a calibration (`compiler/calibration.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from torch_cascade.compiler.units import BYTE, BYTE_RATE, FLOP_RATE, NUMBER, SECOND, Unit

Kind: TypeAlias = Literal["cuda", "cpu"]


class Figure(NamedTuple):
    """A number and where it is from."""

    value: float
    source: str


class Meaning(NamedTuple):
    """What a figure is."""

    unit: Unit
    text: str


SHARED = {
    "read": Meaning(BYTE_RATE, "streaming read of memory"),
    "copy": Meaning(BYTE_RATE, "copy, bytes read and written together"),
    "processors": Meaning(NUMBER, "streaming multiprocessors, or threads that compute"),
    "cache": Meaning(BYTE, "last-level cache"),
    "launch": Meaning(SECOND, "one more kernel in a CUDA graph, one more op on a CPU"),
    "matmul.float32": Meaning(FLOP_RATE, "matrix product, float32"),
}
GPU_FIGURES = SHARED | {
    "matmul.bfloat16": Meaning(FLOP_RATE, "matrix product, bfloat16"),
    "matmul.float16": Meaning(FLOP_RATE, "matrix product, float16"),
    "shared": Meaning(BYTE, "shared memory that one block may have"),
    "attend": Meaning(NUMBER, "part of a matrix product's rate that our attention reaches"),
    "attend.read": Meaning(NUMBER, "part of the read rate that our attention reaches"),
    "step": Meaning(SECOND, "one tile of keys, 128 features, in one program of our attention"),
    "library": Meaning(NUMBER, "part of that rate that torch's attention reaches"),
    "library.step": Meaning(SECOND, "one tile of keys in one block of torch's attention"),
}
CPU_FIGURES = SHARED | {
    "fresh": Meaning(BYTE_RATE, "first write to memory that the system has to give"),
    "stream": Meaning(BYTE_RATE, "keys and values that an attention of few rows reads"),
    "merge": Meaning(BYTE_RATE, "partial results packed, unpacked and merged"),
    "attend": Meaning(FLOP_RATE, "operations of an attention of many rows, float32"),
}


@dataclass(frozen=True, eq=False)  # an identity: hashable, and one object a set of figures
class Device:
    """One device.

    Attributes:
        name: as its driver or operating system says it, or as people do in the table.
        kind: "cuda" or "cpu".
        figures: by the names of GPU_FIGURES or CPU_FIGURES, in the units there.
        is_generic: nothing is known of this device; the figures are of a usual one.
        is_measured: figures of a calibration are among them.
    """

    name: str
    kind: Kind
    figures: Mapping[str, Figure]
    is_generic: bool = False
    is_measured: bool = False

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    def matmul(self, dtype: str) -> float:
        """Operations a second for a dtype; those of float32 where there are no other."""
        figure = self.figures.get(f"matmul.{dtype}") or self.figures["matmul.float32"]
        return figure.value

    def meanings(self) -> Mapping[str, Meaning]:
        """What its figures are."""
        return GPU_FIGURES if self.kind == "cuda" else CPU_FIGURES

    def with_values(self, values: Mapping[str, float], source: str) -> Device:
        """The same device with some figures of another source."""
        changed = {name: Figure(value, source) for name, value in values.items()}
        return replace(self, figures={**self.figures, **changed})

    def as_measured(self, name: str) -> Device:
        """The same as the result of a calibration, under the name that the machine gives it."""
        return replace(self, name=name, is_generic=False, is_measured=True)

    def __str__(self) -> str:
        """Its name, and what kind of figures it has."""
        if self.is_measured:
            return f"{self.name} (calibrated)"
        return f"{self.name} (not calibrated)" if self.is_generic else f"{self.name} (table)"
