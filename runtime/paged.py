"""`PagePool`: keys and values in pages of equal size, counted by how many sequences hold them.

What serving engines keep their KV in (vLLM's block pool, SGLang's token-to-KV pool), for plain
PyTorch programs. A `PagedSequence` is a list of pages and a length; forks share pages until one of
them writes. `runtime/paged_branches.py` has the batch that is decoded in compiled code.

Shapes by axis names: blocks (pages of the pool), H key/value heads, page_size tokens, D features.
Each layer has a pool of keys and one of values [blocks, H, page_size, D]: a page of one head is one
contiguous tile, which is what a kernel that reads pages directly wants, and each layer's pool is a
tensor of its own, so that compiled code can write into it in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_cascade.runtime.paged_checks import DTYPES, FP8, check_count, check_scale

_LARGEST_PAGE = 256


class PoolExhaustedError(RuntimeError):
    """No page is free; nothing was allocated."""


class PagePool:
    """Keys and values of all layers in `blocks` pages of `page_size` tokens each.

    Page 0 is never handed out: page tables are padded with it, so every entry of a table is a page
    that may be read. It holds zeros.

    Attributes:
        keys: a tensor [blocks, H, page_size, D] a layer.
        values: a tensor [blocks, H, page_size, Dv] a layer.
        k_scale, v_scale: float32 [H], what stored fp8 keys and values are times; None for 1.

    Example:
        >>> pool = PagePool(layers=2, blocks=16, kv_heads=2, page_size=4, head_dim=8)
        >>> prompt = pool.sequence()
        >>> prompt.extend(6)
        >>> for layer in range(2):
        ...     prompt.write(layer, torch.randn(2, 6, 8), torch.randn(2, 6, 8))
        >>> prompt, pool.free_pages
        (PagedSequence(length=6, pages=[1, 2]), 13)
    """

    def __init__(
        self,
        layers: int,
        blocks: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Allocate the pages, all zero.

        Args:
            layers: attention layers of the model.
            blocks: pages, the reserved page 0 included.
            kv_heads: H.
            page_size: tokens of a page, 1 to 256.
            head_dim: D.
            v_head_dim: Dv; None for D.
            dtype: float32, bfloat16, float16, float64 or float8_e4m3fn.
            device: where pages and page tables are.
            k_scale: float32 [H], with fp8 only: keys are stored divided by k_scale[h].
            v_scale: the same for values.

        Raises:
            TypeError: a dtype that is not among these, or a size that is no integer.
            ValueError: a size out of range, scales of another shape or without fp8.
        """
        sizes = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, size in {**sizes, "v_head_dim": v_head_dim or head_dim}.items():
            check_count(name, size)
        check_count("blocks", blocks, 2)
        check_count("page_size", page_size, 1, _LARGEST_PAGE)
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
        device = torch.device(device)
        self.k_scale = check_scale("k_scale", k_scale, kv_heads, dtype, device)
        self.v_scale = check_scale("v_scale", v_scale, kv_heads, dtype, device)
        page = (blocks, kv_heads, page_size)
        k, v = (*page, head_dim), (*page, v_head_dim or head_dim)
        self.keys = [torch.zeros(k, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(v, dtype=dtype, device=device) for _ in range(layers)]
        for tensor in (*self.keys, *self.values):
            # CUDA graphs write only to inputs marked so; unguarded, because a guard on the address
            # would compile the model again for every new pool.
            torch._dynamo.mark_static_address(tensor, guard=False)
        self._references = [0] * blocks
        self._free = list(range(blocks - 1, 0, -1))

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.keys[0].shape[2]

    @property
    def blocks(self) -> int:
        """Pages, the reserved page 0 included."""
        return self.keys[0].shape[0]

    @property
    def device(self) -> torch.device:
        """Where the pages are."""
        return self.keys[0].device

    @property
    def free_pages(self) -> int:
        """Pages that can still be allocated."""
        return len(self._free)

    def references(self, page: int) -> int:
        """How many sequences and batches hold a page; 0 for a free one."""
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Take pages, each held once; what they hold is left over from their last use.

        Raises:
            PoolExhaustedError: fewer are free; none was taken.
        """
        if count > len(self._free):
            raise PoolExhaustedError(
                f"{count} pages are needed and {len(self._free)} of {self.blocks - 1} are free: "
                "free sequences that are done, or make a pool of more blocks"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Hold pages once more.

        Raises:
            ValueError: one of them is not allocated; nothing was changed.
        """
        pages = self._allocated(pages)
        for page in pages:
            self._references[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Hold pages once less; a page that nobody holds is free.

        Raises:
            ValueError: one of them is not allocated (freed twice); nothing was changed.
        """
        pages = self._allocated(pages)
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def _allocated(self, pages: Iterable[int]) -> list[int]:
        pages = list(pages)
        for page in pages:
            held = self._references[page] if 0 < page < self.blocks else 0
            if held < pages.count(page):
                raise ValueError(f"page {page} is not allocated (was it freed twice?)")
        return pages

    def sequence(self) -> PagedSequence:
        """An empty sequence of this pool."""
        return PagedSequence(self)

    def copy(self, source: int, target: int) -> None:
        """Copy a page of all layers."""
        for pages in (*self.keys, *self.values):
            pages[target] = pages[source]

    def stored(self, states: Tensor, scale: Tensor | None) -> Tensor:
        """States [..., H, tokens, D] as the pool keeps them: divided by the scale, in its dtype."""
        dtype = self.keys[0].dtype
        states = states.detach()  # the pool outlives the graph of a step
        if dtype != FP8:
            return states.to(dtype)
        if scale is not None:
            states = states.float() / scale[:, None, None]
        largest = torch.finfo(FP8).max
        return states.clamp(-largest, largest).to(FP8)

    def table(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """A page table int32 [rows, most pages of a row], padded with page 0."""
        width = max(map(len, rows))
        padded = [[*row, *[0] * (width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.int32, device=self.device).view(len(rows), width)


class PagedSequence:
    """The tokens of one sequence: the pages that hold them, in order, and how many they are.

    A fork shares all pages. Whoever then adds tokens to a partly filled page that others hold gets
    a copy of that page first, so nobody ever writes into a page that another one reads.
    """

    def __init__(self, pool: PagePool) -> None:
        """No tokens yet; see `PagePool.sequence`."""
        self.pool = pool
        self.pages: list[int] = []
        self.length = 0

    def extend(self, tokens: int) -> None:
        """Make room for more tokens, whose keys and values `write` then fills in.

        Raises:
            PoolExhaustedError: the pool has too few pages; the sequence is unchanged.
        """
        check_count("tokens", tokens, 0)
        used = self.length % self.pool.page_size
        shared = tokens > 0 and used > 0 and self.pool.references(self.pages[-1]) > 1
        wanted = -(-(self.length + tokens) // self.pool.page_size)
        fresh = self.pool.allocate(wanted - len(self.pages) + shared)
        if shared:
            self.pool.copy(self.pages[-1], fresh[0])
            self.pool.free([self.pages.pop()])
        self.pages += fresh
        self.length += tokens

    def write(self, layer: int, k: Tensor, v: Tensor, start: int = 0) -> None:
        """Write keys [H, tokens, D] and values [H, tokens, Dv] of tokens from `start` on.

        Raises:
            ValueError: other shapes, tokens outside of the sequence, or pages held by others too.
        """
        tokens, size = k.shape[1], self.pool.page_size
        if start < 0 or start + tokens > self.length:
            raise ValueError(
                f"tokens [{start}, {start + tokens}) are outside of a sequence of {self.length}: "
                "extend it first"
            )
        pools = (
            (self.pool.keys[layer], "k", k, self.pool.k_scale),
            (self.pool.values[layer], "v", v, self.pool.v_scale),
        )
        for pages, name, states, _ in pools:
            expected = (pages.shape[1], tokens, pages.shape[3])
            if states.shape != expected:
                raise ValueError(f"{name} must be {list(expected)}, got {list(states.shape)}")
        places = torch.arange(start, start + tokens)
        chosen = torch.tensor(self.pages, dtype=torch.int64)[places // size]
        for page in set(chosen.tolist()):
            if self.pool.references(page) > 1:
                raise ValueError(f"page {page} is held by others too: write before forking")
        page, slot = chosen.to(self.pool.device), (places % size).to(self.pool.device)
        for pages, _, states, scale in pools:
            pages[page, :, slot] = self.pool.stored(states, scale).transpose(0, 1)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of keys [H, length, D] and values [H, length, Dv], as they are stored."""
        pages = torch.tensor(self.pages, dtype=torch.int64, device=self.pool.device)
        pools = self.pool.keys[layer], self.pool.values[layer]
        k, v = (p[pages].transpose(0, 1).flatten(1, 2)[:, : self.length] for p in pools)
        return k, v

    def fork(self) -> PagedSequence:
        """A second sequence of the same tokens, which shares all pages."""
        self.pool.retain(self.pages)
        other = PagedSequence(self.pool)
        other.pages, other.length = list(self.pages), self.length
        return other

    def free(self) -> None:
        """Give the pages back; the sequence is empty then."""
        self.pool.free(self.pages)
        self.pages, self.length = [], 0

    def __repr__(self) -> str:
        """Length and pages."""
        return f"PagedSequence(length={self.length}, pages={self.pages})"
