"""Which programs exist (`valid`), and which of them a rewrite is owed on (`expectation`)."""

from __future__ import annotations

from collections.abc import Iterator

from .program_spec import Mask, Program, Segment, Sizes, group_size, shares

NEEDS_LITERAL = ("stack", "index_constant", "cat")
STRIDE_0_STORAGES = ("bhld", "blhd", "permute", "bhdl")
HEAD_MASKS = ("nhmk", "1hmk")
IN_GRAPH = ("causal", "window", "tree", "padding", "isolate")


def valid(program: Program) -> bool:
    """The program is one that Python runs, and no field says what another makes meaningless."""
    return not any(_faults(program))


def _faults(program: Program) -> Iterator[bool]:
    first = program.calls[0]
    yield len(program.segments) != len(first.keys)
    yield any(sizes.total - program.crop < 1 for sizes in program.calls)
    fixed = {(s.kv_heads, s.group, s.features, s.value_features) for s in program.calls}
    yield len(fixed) > 1
    yield program.dims == "literal" and len(program.calls) > 1
    for index, segment in enumerate(program.segments):
        yield from _segment_faults(program, segment, [s.keys[index] for s in program.calls])
    yield from _cat_faults(program)
    yield from _head_faults(program, first)
    yield from _form_faults(program)
    yield from _mask_faults(program, program.mask)
    yield from _output_faults(program, first)


def _segment_faults(program: Program, segment: Segment, lengths: list[int]) -> Iterator[bool]:
    first = program.calls[0]
    spellings = {segment.spelling, segment.v_spelling or segment.spelling}
    yield bool(spellings & set(NEEDS_LITERAL)) and program.dims != "literal"
    yield "two_steps" in spellings and program.dims == "shape"
    yield segment.storage in ("stacked", "unbind") and first.features != first.value_features
    yield "outside" in spellings and (
        segment.storage not in STRIDE_0_STORAGES or segment.v_spelling is not None
    )
    yield segment.write != "none" and (
        segment.rows != "own" or segment.storage != "bhld" or min(lengths) < 1
    )
    yield segment.stored == program.dtype
    yield segment.rows == "own" and spellings != {"none"}


def _cat_faults(program: Program) -> Iterator[bool]:
    if program.cat in ("left", "right"):
        yield len(program.segments) < 3
    if program.cat == "mapped_after":
        one, other = (*program.segments, Segment())[:2]
        yield len(program.segments) < 2
        yield one.rows == "own" or one.rows != other.rows or "outside" in (one.spelling,)
        yield (one.spelling, one.v_spelling) != (other.spelling, other.v_spelling)
        yield one.spelling == "select_expand" or one.v_spelling == "select_expand"
    if program.crop:
        yield program.mask.kind not in ("none", "is_causal", "input", "causal", "window", "alibi")
        yield program.mask.padding


def _head_faults(program: Program, sizes: Sizes) -> Iterator[bool]:
    yield (program.heads == "same") != (sizes.group == 1)
    yield program.heads == "enable_gqa" and program.form != "sdpa"
    yield program.heads in ("grouped", "broadcast") and program.form != "eager"
    yield program.heads == "broadcast" and (
        sizes.kv_heads != 1 or program.scores not in ("matmul", "at")
    )
    yield program.heads == "grouped" and (
        program.scores != "matmul"
        or program.mask.kind == "alibi"
        or (program.mask.kind in ("input", "tree") and program.mask.shape in HEAD_MASKS)
    )


def _form_faults(program: Program) -> Iterator[bool]:
    by_hand = (program.scores, program.scaling, program.softmax, program.masking, program.dropout)
    yield program.form == "sdpa" and by_hand != ("matmul", "mul", "method", "fill", False)
    yield program.form == "eager" and program.call != "minimal"
    yield program.call == "torch_c" and program.heads == "enable_gqa"
    yield program.dtype == "float64" and program.softmax in ("float32", "to_float")
    yield program.scaling == "none" and program.scale != 1.0
    yield program.autocast and program.dtype != "float32"
    if program.scores == "baddbmm":
        yield program.scaling not in ("mul", "none", "q", "k") or program.autocast
        yield program.mask.wide
        yield not (program.mask.kind in ("none", "alibi") or program.mask.additive)


def _mask_faults(program: Program, mask: Mask) -> Iterator[bool]:
    if mask.kind in ("none", "is_causal"):
        by_hand = program.form == "eager" and mask.kind == "is_causal"
        additive, fill = (mask.additive, mask.fill) if by_hand else (None, "inf")
        yield mask != Mask(mask.kind, additive=additive, fill=fill)
    yield mask.additive in ("given", "bias") and (
        mask.kind != "input" or mask.expanded or mask.padding
    )
    yield mask.additive == "times" and mask.fill != "finite"
    yield mask.fill == "finite" and program.dtype == "float16"
    yield mask.fill == "finite" and program.form == "sdpa" and mask.additive is None
    yield mask.wide and (mask.additive is None or program.dtype not in ("bfloat16", "float16"))
    yield mask.wide and program.form == "eager" and program.softmax == "method"
    yield mask.padding and mask.kind not in ("causal", "window", "tree")
    yield mask.expanded and (mask.kind not in IN_GRAPH or mask.shape in HEAD_MASKS)
    yield mask.kind == "alibi" and (mask.additive is not None or mask.wide)
    yield mask.kind == "tree" and mask.shape not in ("mk", "11mk", "n1mk", "nhmk")
    yield mask.kind not in ("tree", "input") and mask.shape != "11mk"
    yield mask.kind != "input" and mask.hidden != "some"
    yield mask.spelling not in _SPELLINGS.get(mask.kind, ("arange",))


_SPELLINGS = {
    "causal": ("arange", "tril", "triu", "positions", "row_positions"),
    "window": ("arange", "positions", "row_positions"),
    "tree": ("arange", "pad"),
    "padding": ("arange", "left", "mask2d"),
}


def _output_faults(program: Program, sizes: Sizes) -> Iterator[bool]:
    square = sizes.features == sizes.value_features
    yield program.layers > 1 and (not square or program.outputs == "weights")
    yield program.outputs == "weights" and program.form != "eager"
    yield program.outputs == "expanded" and program.segments[0].rows == "own"
    yield program.follow == "residual" and not square
    yield program.follow == "view" and not _view_works(program, square)


def _view_works(program: Program, square: bool) -> bool:
    """SDPA on a CPU answers in the layout of q where its flash kernel takes the call."""
    return (
        program.form == "sdpa"
        and square
        and program.q_layout in ("bmhd", "flat")
        and program.layers == 1
        and program.mask.kind in ("none", "is_causal")
    )


def expectation(program: Program) -> bool | None:
    """True: a rewrite is owed. False: nothing is shared, so none may happen. None: either."""
    if not any(shares(program, sizes) for sizes in program.calls):
        return False
    return True if owed(program) else None


def owed(program: Program) -> bool:
    """Every spelling in it is one that the product promises to see through."""
    mask = program.mask
    promised = [
        any(_owed_segments(program)),
        not (_symbolic(program) and _beyond_proof(program)),
        program.heads not in ("grouped", "broadcast", "before"),
        program.scores != "baddbmm",
        program.scaling not in ("k", "both"),
        program.outputs != "weights",
        not program.autocast,
        not program.crop,
        mask.fill == "inf",
        mask.additive != "times",
    ]
    return all(promised)


def _symbolic(program: Program) -> bool:
    """Some compile of it has symbolic sizes."""
    return program.dynamic is True or (program.dynamic is None and len(program.calls) > 1)


def _beyond_proof(program: Program) -> bool:
    """What holds of the sizes at hand and not of all sizes that a symbol may stand for.

    `arange(N) // (N // B)` repeats rows only where B divides N; two groupings of the batch nest
    only where their numbers say so; and literal sizes name a product of several symbols.
    """
    spellings = {s for segment in program.segments for s in (segment.spelling, segment.v_spelling)}
    return (
        (program.dims == "shape" and bool(spellings & {"index_select", "index_arange"}))
        or any(segment.rows == "modulo" for segment in program.segments)
        or program.dims == "literal"
    )


def _owed_segments(program: Program) -> Iterator[bool]:
    for sizes in program.calls:
        for index, segment in enumerate(program.segments):
            shared = group_size(segment, sizes) > 1 and segment.rows != "modulo"
            yield shared and sizes.keys[index] > 0 and not _out_of_sight(program, sizes, index)


def _out_of_sight(program: Program, sizes: Sizes, index: int) -> bool:
    """No query sees a key of the segment, wherever that is said in the graph."""
    start = sum(sizes.keys[:index])
    if program.mask.kind == "is_causal":
        return start >= sizes.queries
    oldest = sizes.total - sizes.queries - program.mask.window
    return program.mask.kind == "window" and start + sizes.keys[index] - 1 <= oldest
