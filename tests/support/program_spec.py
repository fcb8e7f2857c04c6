"""Programs as data: one attention over keys that may be shared, in every way we know to write it.

A `Program` says what is computed and how it is spelt. `program_source` turns it into Python text,
`program_values` into inputs, `program_draw` draws one, `programs` runs one and judges the result.
`repr(program)` evaluates to the program again, so a line of a report is a reproduction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Rows = Literal["all", "request", "mid", "own", "modulo"]

# How a segment's rows are given to the batch, by row map. "outside": the input has stride 0.
MAPS: dict[str, tuple[str, ...]] = {
    "all": (
        "expand",
        "expand_sizes",
        "broadcast_to",
        "repeat",
        "repeat_interleave",
        "select_expand",
        "index_zeros",
        "two_steps",
        "outside",
    ),
    "request": (
        "repeat_interleave",
        "repeat_interleave_function",
        "expand_reshape",
        "expand_flatten",
        "repeat_flatten",
        "index_select",
        "index_arange",
        "index_constant",
        "stack",
    ),
    "modulo": ("repeat", "expand_reshape", "cat", "index_arange"),
    "own": ("none",),
}
MAPS["mid"] = MAPS["request"]

# How the base of a segment arrives; every one is brought to [rows, heads, keys, features] first.
STORAGES = (
    "bhld",
    "blhd",
    "permute",
    "bhdl",
    "merged",
    "flat",
    "slice",
    "narrow",
    "rows",
    "stacked",
    "unbind",
    "fused",
)
JOINT_STORAGES = ("stacked", "unbind", "fused")  # K and V in one input
WRITES = ("none", "index_copy", "index_copy_", "setitem", "index_put", "slice_copy")
CATS = ("flat", "left", "right", "mapped_after")
CAT_LAYOUTS = ("bhld", "blhd", "bhdl")
HEADS = (
    "same",
    "enable_gqa",
    "repeat_kv",
    "repeat_interleave",
    "expand_flatten",
    "before",
    "grouped",
    "broadcast",
)
CALLS = ("keywords", "positional", "minimal", "torch_c")
SCORES = ("matmul", "at", "einsum", "bmm", "baddbmm")
SCALES = ("mul", "div", "q", "k", "both", "none")
SOFTMAXES = ("method", "float32", "to_float", "module")
Q_LAYOUTS = ("bhmd", "bmhd", "flat", "merged", "sliced")
FOLLOWS = ("none", "reshape", "contiguous_view", "view", "residual")
OUTPUTS = ("none", "cache", "weights", "expanded")
MASKS = ("none", "is_causal", "input", "causal", "window", "tree", "padding", "alibi", "isolate")
MASK_SHAPES = ("11mk", "n1mk", "nhmk", "mk", "n11k", "1hmk", "strided")
CAUSALS = ("arange", "tril", "triu", "positions")
ADDITIVES = ("where", "masked_fill", "times")


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call. N = requests * mid * branches rows of queries."""

    requests: int = 1
    mid: int = 1
    branches: int = 2
    kv_heads: int = 1
    group: int = 1
    queries: int = 1
    features: int = 8
    value_features: int = 8
    keys: tuple[int, ...] = (5, 3)

    @property
    def rows(self) -> int:
        return self.requests * self.mid * self.branches

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def total(self) -> int:
        return sum(self.keys)

    def base_rows(self, rows: Rows) -> int:
        """Rows of the base of a segment."""
        return {
            "all": 1,
            "request": self.requests,
            "mid": self.requests * self.mid,
            "own": self.rows,
            "modulo": self.branches,
        }[rows]


@dataclass(frozen=True)
class Segment:
    """A run of keys with one row map; `v_spelling` None means V is spelt like K."""

    rows: Rows = "own"
    spelling: str = "none"
    v_spelling: str | None = None
    storage: str = "bhld"
    stored: str | None = None  # dtype of the input where it is not the program's
    copy: Literal["none", "clone", "contiguous"] = "none"
    strides: Literal["dense", "sliced"] = "dense"
    write: str = "none"


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, or a bias; `additive` None hands the bool itself to attention."""

    kind: str = "none"
    shape: str = "11mk"
    spelling: str = "arange"
    additive: str | None = None
    fill: Literal["inf", "finite"] = "inf"
    wide: bool = False  # an additive mask in float32 although the program is not
    padding: bool = False  # and with per-request padding of the first segment
    expanded: bool = False  # the bool is expanded to [N, 1, M, K] first, as HF does
    window: int = 4
    hidden: Literal["none", "some", "rows"] = "some"


@dataclass(frozen=True)
class Program:
    """One program; the first of `calls` is compiled, the others follow on the same function."""

    calls: tuple[Sizes, ...] = (Sizes(),)
    segments: tuple[Segment, ...] = (Segment("all", "expand"), Segment())
    cat: str = "flat"
    cat_layout: str = "bhld"
    cat_name: Literal["cat", "concat", "concatenate"] = "cat"
    cat_negative: bool = False
    crop: int = 0  # keys dropped from the front after the cat
    heads: str = "same"
    q_layout: str = "bhmd"
    form: Literal["sdpa", "eager"] = "sdpa"
    call: str = "minimal"
    scores: str = "matmul"
    scale: float | None = None
    scaling: str = "mul"
    softmax: str = "method"
    masking: Literal["fill", "where"] = "fill"
    dropout: bool = False
    layers: int = 1
    mask: Mask = Mask()
    dtype: str = "float32"
    autocast: bool = False
    follow: str = "none"
    outputs: str = "none"
    dims: Literal["shape", "literal", "argument"] = "shape"
    dynamic: bool | None = None
    seed: int = 0

    def scale_value(self) -> float:
        """The factor on the scores."""
        return self.scale if self.scale is not None else 1 / math.sqrt(self.calls[0].features)


def group_size(segment: Segment, sizes: Sizes) -> int:
    """How many rows of the batch read one row of the segment's base."""
    return sizes.rows // sizes.base_rows(segment.rows)


def shares(program: Program, sizes: Sizes) -> bool:
    """Some segment with keys is read by more than one row."""
    segments = zip(program.segments, sizes.keys, strict=True)
    return any(length > 0 and group_size(segment, sizes) > 1 for segment, length in segments)
