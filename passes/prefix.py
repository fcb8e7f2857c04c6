"""Analysis: K and V of an attention as segments of keys, each with the batch rows that share it.

    k = cat([prefix.repeat_interleave(T, 0), suffix], 2)         # [B*T, H, P + S, D]

resolves to two segments: `prefix` over keys [0, P), read by row n through the digit `n // T`
(T branches share a row), and `suffix` over keys [P, P+S), read by row n itself.

`passes/pieces.py` finds where the values are; here K and V are paired and their batch maps read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_cascade.compiler.graph import Size, Sizes, product, shape
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.axes import ONE, ZERO, Digit, complement, normalise, same_digits
from torch_cascade.passes.pieces import Piece, pieces_of
from torch_cascade.passes.site import AttentionSite, AxisName, Operand


@dataclass(frozen=True)
class Segment:
    """Keys [start, start+length) of a site, K and V alike.

    Attributes:
        k, v: where the values are.
        start, length: the run on the site's key axis.
        kept: digits of the batch row n that choose the KV row, major first.
        dropped: the other digits of n: the branches that share a KV row, major first.
        source: the segment as it was before it was spread over more rows, by the option `levels`
            or to be joined with a neighbour; None for one that is read as it is.
    """

    k: Piece
    v: Piece
    start: Size
    length: Size
    kept: tuple[Digit, ...]
    dropped: tuple[Digit, ...]
    source: Segment | None = None

    @property
    def branches(self) -> Size:
        """How many query rows read one KV row."""
        return product(d.size for d in self.dropped)

    @property
    def is_stored(self) -> bool:
        """True iff K or V is in pages or in fp8: read as it is, never joined with a neighbour."""
        pieces = (self.k, self.v) if self.source is None else ()
        return any(piece.pages is not None or piece.is_fp8 for piece in pieces)

    @property
    def rows(self) -> Size:
        """How many KV rows there are."""
        return product(d.size for d in self.kept)


def segments(site: AttentionSite, sizes: Sizes) -> tuple[Segment, ...] | Declined:
    """Resolve K and V of a site into segments, in key order.

    Returns:
        The segments, or a decline: K and V do not resolve alike, heads are laid out so that they
        are no GQA group, or the batch digits do not tile the batch.
    """
    refused = _contract(site, sizes)
    if refused is not None:
        return refused
    pieces_k = pieces_of(site.k, batch_size(site), sizes)
    pieces_v = pieces_of(site.v, batch_size(site), sizes)
    if len(pieces_k) != len(pieces_v):
        detail = f"K has {len(pieces_k)} segments, V {len(pieces_v)}"
        return _mismatch(site, detail)
    found: list[Segment] = []
    start = ZERO
    for k, v in zip(pieces_k, pieces_v, strict=True):
        segment = _segment(site, k, v, start, sizes)
        if isinstance(segment, Declined):
            return segment
        found.append(segment)
        start = start + segment.length
    return tuple(found)


def _contract(site: AttentionSite, sizes: Sizes) -> Declined | None:
    """What attention itself needs to be equal; SDPA's fake kernel compares none of it."""
    q, k, v = site.q, site.k, site.v
    pairs: list[tuple[str, Operand, Operand, AxisName]]
    pairs = [("key length", k, v, "k"), ("batch", k, v, "n"), ("head_dim", q, k, "d")]
    if axis_size(k, "n") != 1:
        pairs.append(("batch", q, k, "n"))
    for name, a, b, axis in pairs:
        left, right = axis_size(a, axis), axis_size(b, axis)
        if not sizes.agree(left, right):
            detail = f"{name} {left} and {right} are not known to be equal"
            return Declined(Reason.KV_MISMATCH, site.node.name, detail)
    return None


def _mismatch(site: AttentionSite, detail: str) -> Declined:
    hint = "build K and V of the prefix by the same operations"
    return Declined(Reason.KV_MISMATCH, site.node.name, detail, hint)


def _segment(
    site: AttentionSite, k: Piece, v: Piece, start: Size, sizes: Sizes
) -> Segment | Declined:
    batch = batch_size(site)
    if not sizes.agree(k.length, v.length):
        return _mismatch(site, f"at key {start}: K has {k.length} keys, V {v.length}")
    kept = normalise(k.digits("n"), sizes)
    if not same_digits(kept, normalise(v.digits("n"), sizes), sizes.agree):
        return _mismatch(site, f"at key {start}: K and V map the batch differently")
    heads_k, heads_v = (normalise(piece.digits("h"), sizes) for piece in (k, v))
    if not same_digits(heads_k, heads_v, sizes.agree):
        return _mismatch(site, f"at key {start}: K and V map the heads differently")
    dropped = complement(kept, "n", batch, sizes)
    if dropped is None:
        detail = f"batch digits {kept} do not tile a batch of {batch}"
        return Declined(Reason.LAYOUT, site.node.name, detail)
    for piece, operand in ((k, site.k), (v, site.v)):
        if not _heads_are_groups(piece, operand, sizes):
            detail = f"heads of {piece.base.name} are not read in groups of neighbours"
            return Declined(Reason.LAYOUT, site.node.name, detail)
    return Segment(k, v, start, k.length, kept, normalise(dropped, sizes))


def batch_size(site: AttentionSite) -> Size:
    """The number of query rows N of a site."""
    return shape(site.q.node)[site.q.axes.index("n")]


def axis_size(operand: Operand, axis: AxisName) -> Size:
    """The size of one axis of an operand; 1 where it has no such axis."""
    if axis not in operand.axes:
        return ONE
    return shape(operand.node)[operand.axes.index(axis)]


def _heads_are_groups(piece: Piece, operand: Operand, sizes: Sizes) -> bool:
    """True iff query head h reads KV head h // group: only minor digits of h may be dropped."""
    kept = normalise(piece.digits("h"), sizes)
    if not kept:
        return True
    total = axis_size(operand, "h")
    return len(kept) == 1 and sizes.equal(kept[0].stride * kept[0].size, total)
