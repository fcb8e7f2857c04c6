"""The Python text of a program: what runs, what is printed in reports, and the inputs it takes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .program_attention import attention_lines, head_expansion
from .program_mask import mask_lines
from .program_segments import load_joint, load_one, map_rows, write_keys
from .program_spec import JOINT_STORAGES, Program, Sizes


@dataclass(frozen=True)
class Input:
    """An argument of the program; `role` names its values, `segment` the keys it belongs to."""

    name: str
    role: str
    segment: int = -1


@dataclass
class Source:
    """Text under construction: lines of the body and the inputs that they use."""

    program: Program
    sizes: Sizes
    lines: list[str] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)

    def take(self, name: str, role: str, segment: int = -1) -> str:
        """Declare an input."""
        self.inputs.append(Input(name, role, segment))
        return name

    def add(self, *lines: str) -> None:
        """Append lines to the body."""
        self.lines += lines

    def number(self, expression: str, value: int) -> str:
        """A size as the program spells sizes: its value, or an expression of shapes."""
        return str(value) if self.program.dims == "literal" else expression

    @property
    def n(self) -> str:
        return self.number("N", self.sizes.rows)

    @property
    def m(self) -> str:
        return self.number("M", self.sizes.queries)

    def keys(self, name: str = "k") -> str:
        """The length of the cat'ed keys."""
        return self.number(f"{name}.shape[2]", self.sizes.total - self.program.crop)

    def length(self, index: int) -> str:
        """The length of a segment, wherever its key axis is at that point."""
        axis = {"bhld": 2, "blhd": 1, "bhdl": 3}[self.program.cat_layout]
        if self.program.cat == "mapped_after" and index < 2:
            axis = 2
        return self.number(f"k{index}.shape[{axis}]", self.sizes.keys[index])

    def group(self, index: int) -> str:
        """How many rows read one row of a segment's base."""
        segment, sizes = self.program.segments[index], self.sizes
        if self.program.dims == "argument":
            return {
                "all": "N",
                "request": "mid * branches",
                "mid": "branches",
                "modulo": "requests * mid",
                "own": "1",
            }[segment.rows]
        return self.number(f"t{index}", sizes.rows // sizes.base_rows(segment.rows))


def emit(program: Program, sizes: Sizes) -> Source:
    """The body and the inputs of a program for one call."""
    source = Source(program, sizes)
    _load_q(source)
    for index in range(len(program.segments)):
        _load(source, index)
    _cat(source)
    if program.outputs == "cache":
        source.add("cache = (k, v)")
    for name in "kv":
        source.add(*head_expansion(source, name, "after"))
    mask_lines(source)
    attention_lines(source)
    _finish(source)
    return source


def text(program: Program, sizes: Sizes | None = None) -> str:
    """The whole function `fn` as Python text."""
    source = emit(program, sizes or program.calls[0])
    names = [i.name for i in source.inputs]
    if program.dims == "argument":
        names += ["requests", "mid", "branches"]
    body = source.lines
    if program.autocast:
        region = "with torch.autocast('cpu', dtype=torch.bfloat16):"
        body = [region, *("    " + line for line in body)]
    lines = [f"def fn({', '.join(names)}):", *("    " + line for line in body)]
    return "import math\n\nimport torch\nimport torch.nn.functional as F\n\n\n" + "\n".join(lines)


def reference_text(program: Program, sizes: Sizes | None = None) -> str:
    """The same function with every floating dtype it names widened to float64."""
    plain = text(program, sizes).replace("dtype=torch.bfloat16):", "enabled=False):")
    wide = re.sub(r"(?<!finfo\()torch\.(float32|float16|bfloat16)\b", "torch.float64", plain)
    return wide.replace(".float()", ".double()")


def _load_q(source: Source) -> None:
    heads, d = source.sizes.heads, source.sizes.features
    source.take("q", "q")
    layout = source.program.q_layout
    if layout == "bmhd":
        source.add("q = q.transpose(1, 2)")
    if layout == "flat":
        source.add(f"q = q.view(*q.shape[:2], {heads}, {d}).transpose(1, 2)")
    if layout == "merged":
        source.add(f"q = q.view(q.shape[0] // {heads}, {heads}, *q.shape[1:])")
    if source.program.dims != "literal":
        source.add("N, M = q.shape[0], q.shape[2]")


def _load(source: Source, index: int) -> None:
    """Bring a segment to its place in the cat: load, cast, write, expand heads, map, copy."""
    segment = source.program.segments[index]
    if segment.storage in JOINT_STORAGES:
        source.add(*load_joint(source, index))
    for name in "kv":
        if segment.storage not in JOINT_STORAGES:
            source.take(f"{name}{index}", name, index)
            source.add(*load_one(source, f"{name}{index}", name, segment.storage))
        if segment.stored is not None:
            source.add(f"{name}{index} = {name}{index}.to(q.dtype)")
        if segment.write != "none":
            source.add(*write_keys(source, index, name))
        source.add(*head_expansion(source, f"{name}{index}", "before"))
    if segment.rows in ("request", "mid", "modulo") and source.program.dims == "shape":
        source.add(f"t{index} = N // k{index}.shape[0]")
    if source.program.cat == "mapped_after" and index < 2:
        return
    for name in "kv":
        _place(source, f"{name}{index}", name, index)


def _place(source: Source, x: str, name: str, index: int) -> None:
    """Map the rows of `x`, copy it if asked to, and turn it to the layout of the cat."""
    segment = source.program.segments[index]
    spelling = segment.spelling if name == "k" else (segment.v_spelling or segment.spelling)
    source.add(*map_rows(source, x, index, spelling))
    if name == "k" and index == 0 and source.program.outputs == "expanded":
        source.add(f"shared = {x}")
    if segment.copy != "none":
        source.add(f"{x} = {x}.{segment.copy}()")
    layout = source.program.cat_layout
    if layout == "blhd":
        source.add(f"{x} = {x}.transpose(1, 2)")
    if layout == "bhdl":
        source.add(f"{x} = {x}.transpose(2, 3)")


def _cat(source: Source) -> None:
    program = source.program
    axis = {"bhld": 2, "blhd": 1, "bhdl": 3}[program.cat_layout]
    axis = axis - 4 if program.cat_negative else axis
    for name in "kv":
        parts = [f"{name}{i}" for i in range(len(program.segments))]
        if program.cat == "mapped_after":
            first = f"{name}01"
            source.add(f"{first} = torch.cat([{parts[0]}, {parts[1]}], 2)")
            _place(source, first, name, 0)
            parts = [first, *parts[2:]]
        source.add(f"{name} = {_joined(program, parts, axis)}")
        if program.cat_layout != "bhld":
            turn = "1, 2" if program.cat_layout == "blhd" else "2, 3"
            source.add(f"{name} = {name}.transpose({turn})")
        if program.crop:
            source.add(f"{name} = {name}[:, :, {program.crop}:]")


def _joined(program: Program, parts: list[str], axis: int) -> str:
    """One cat of all parts, or nested ones."""
    call = f"torch.{program.cat_name}"
    if len(parts) == 1:
        return parts[0]
    if program.cat == "left" and len(parts) > 2:
        return f"{call}([{call}(({parts[0]}, {parts[1]}), {axis}), {', '.join(parts[2:])}], {axis})"
    if program.cat == "right" and len(parts) > 2:
        tail = f"{call}([{', '.join(parts[1:])}], {axis})"
        return f"{call}([{parts[0]}, {tail}], dim={axis})"
    return f"{call}([{', '.join(parts)}], dim={axis})"


def _finish(source: Source) -> None:
    """What the program does with the output, and what it returns."""
    width = source.sizes.heads * source.sizes.value_features
    shape = f"({source.n}, {source.m}, {width})"
    follow = {
        "none": [],
        "reshape": [f"o = o.transpose(1, 2).reshape{shape}"],
        "contiguous_view": [f"o = o.transpose(1, 2).contiguous().view{shape}"],
        "view": [f"o = o.transpose(1, 2).view{shape}"],
        "residual": ["o = o + q"],
    }[source.program.follow]
    extra = {"none": "", "cache": ", *cache", "weights": ", p", "expanded": ", shared"}
    source.add(*follow, f"return o{extra[source.program.outputs]}")
