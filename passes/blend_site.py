"""Where a graph may reuse cached keys and values: its `cascade::reuse_kv` markers together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from torch_cascade.compiler.graph import Size, Sizes, shape
from torch_cascade.compiler.report import Declined, Reason
from torch_cascade.passes.same_value import same_value
from torch_cascade.passes.token_frontier import contracts, reuse_kv


@dataclass(frozen=True)
class ReuseSite:
    """The marked layers of one prefill.

    Attributes:
        markers: one a layer, in graph order.
        batch: N, the rows of the batch.
        tokens: L, the length of the prompt.
        fresh_rows: int64 [N, F], the tokens without a cached copy.
        chunks: int64 [N, L], the chunk of each token; None where it is not said.
    """

    markers: tuple[fx.Node, ...]
    batch: Size
    tokens: Size
    fresh_rows: fx.Node
    chunks: fx.Node | None

    @property
    def fresh(self) -> Size:
        """F, the number of tokens without a cached copy."""
        return shape(self.fresh_rows)[1]

    @property
    def cached(self) -> Size:
        """How many tokens of a batch row have a cached copy."""
        return self.tokens - self.fresh

    @property
    def each(self) -> Size | None:
        """N where each batch row has rows of its own; None for a batch of one."""
        return None if self.batch == 1 else self.batch


def markers_of(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The marked layers, in graph order."""
    return tuple(node for node in graph.nodes if node.target is reuse_kv)


def reads_marker(keys: fx.Node) -> bool:
    """Whether keys are those of a marked layer, expanded for heads or moved about."""
    waiting, seen = [keys], {keys}
    while waiting:
        node = waiting.pop()
        if node.target is reuse_kv:
            return True
        if not contracts(node.target):
            new = [source for source in node.all_input_nodes if source not in seen]
            seen.update(new)
            waiting += new
    return False


def find_reuse(markers: tuple[fx.Node, ...], sizes: Sizes) -> ReuseSite | Declined:
    """Read the markers of a graph as the layers of one prefill.

    Cached keys may have symbols of their own for sizes that any valid call has equal; such an
    equality may become a guard (`Sizes.agree`).
    """
    first = markers[0]
    k, _, _, _, fresh_rows, chunks = _arguments(first)
    assert k is not None and fresh_rows is not None
    batch, _, tokens, _ = shape(k)
    for marker in markers:
        arguments = _arguments(marker)
        if not same_value(arguments[4:], (fresh_rows, chunks)):
            return _mismatch(marker, f"fresh_rows or chunks are not those of {first.name}")
        for node in arguments[:4]:
            assert node is not None
            if not (sizes.agree(shape(node)[0], batch) and sizes.agree(shape(node)[2], tokens)):
                found = f"{node.name} has sizes {list(shape(node))}"
                return _mismatch(marker, f"{found}, not {batch} rows of {tokens} tokens")
    for node, length in ((fresh_rows, None), (chunks, tokens)):
        if node is None:
            continue
        same = sizes.agree(shape(node)[0], batch)
        if not same or (length is not None and not sizes.agree(shape(node)[1], length)):
            return _mismatch(first, f"{node.name} has sizes {list(shape(node))}")
    return ReuseSite(markers, batch, tokens, fresh_rows, chunks)


def _arguments(marker: fx.Node) -> tuple[fx.Node | None, ...]:
    """k, v, k_cached, v_cached, fresh_rows, chunks."""
    names = ("k", "v", "k_cached", "v_cached", "fresh_rows", "chunks")
    given = dict(zip(names, marker.args, strict=False)) | marker.kwargs
    return tuple(given.get(name) for name in names)  # type: ignore[misc]


def _mismatch(marker: fx.Node, detail: str) -> Declined:
    return Declined(Reason.REUSE_MISMATCH, marker.name, detail)
