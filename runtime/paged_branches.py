"""`PagedBranches`: a batch of branches decoded from shared prefixes, all of it in pages.

Shapes by axis names: R requests, T branches a request, N = R*T rows, H key/value heads, M new
tokens, D features, P and S columns of the page tables. Row n continues request n // T.

The prefix is read by one table row a request, the branches' own tokens by another table. So the
last, partly filled page of a prefix needs no copy a branch (SGLang PR 7725 duplicates it): nobody
writes into it any more, a length says how many of its tokens count, and every branch starts a page
of its own. A copy in every branch would be read T times instead of once, and one unbroken table
for prefix and suffix is needed only by kernels that take a single table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_cascade.runtime.paged import PagedSequence
from torch_cascade.runtime.paged_checks import FP8, check_count


class PagedBranches:
    """Branches of prefixes in a `PagePool`, with everything compiled code needs on the device.

    All tensors keep their size and address: one compiled step serves every token, also captured
    in a CUDA graph. `read` is plain indexing, `pool[table]`, so it is right with any backend;
    `torch.compile(backend="cascade")` reads the pages themselves, those of the prefix once a
    request.

    Attributes:
        prefix_table: int32 [R, P], pages of each prefix, padded with page 0.
        prefix_lens: int32 [R], tokens of each prefix.
        suffix_table: int32 [N, S], pages of each branch.
        suffix_lens: int32 [N], tokens of each branch.

    Example:
        One decode step of a layer, with a prefix that ends in the middle of a page:

        >>> import torch.nn.functional as F
        >>> from torch_cascade.runtime.paged import PagePool
        >>> pool = PagePool(layers=1, blocks=32, kv_heads=2, page_size=4, head_dim=16)
        >>> prompt = pool.sequence()
        >>> prompt.extend(7)
        >>> prompt.write(0, torch.randn(2, 7, 16), torch.randn(2, 7, 16))
        >>> batch = PagedBranches([prompt], branches=8, max_suffix=5)
        >>> def step(q, k, v):
        ...     mask = batch.mask(q.shape[2])
        ...     batch.append(0, k, v)
        ...     keys, values = batch.read(0, q.dtype)
        ...     out = F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
        ...     batch.advance(q.shape[2])  # once a step, after the last layer
        ...     return out
        >>> compiled = torch.compile(step, backend="cascade")  # any backend computes the same
        >>> out = step(torch.randn(8, 4, 1, 16), torch.randn(8, 2, 1, 16), torch.randn(8, 2, 1, 16))
        >>> out.shape, batch.suffix_lens[0]
        (torch.Size([8, 4, 1, 16]), tensor(1, dtype=torch.int32))
    """

    def __init__(self, prefixes: Sequence[PagedSequence], branches: int, max_suffix: int) -> None:
        """Hold the prefixes' pages and allocate those of the branches.

        Args:
            prefixes: one sequence of at least one token a request, all of one pool. They may grow
                afterwards: the batch keeps the tokens they have now.
            branches: T.
            max_suffix: tokens a branch may add.

        Raises:
            TypeError: a size that is no integer.
            ValueError: no prefixes, an empty one, prefixes of several pools, a size below 1.
            PoolExhaustedError: the pool has too few pages; nothing is held then.
        """
        check_count("branches", branches)
        check_count("max_suffix", max_suffix)
        if not prefixes or any(p.length == 0 for p in prefixes):
            raise ValueError("prefixes must be sequences of at least one token, one a request")
        self.pool = pool = prefixes[0].pool
        if any(p.pool is not pool for p in prefixes):
            raise ValueError("prefixes must be sequences of one pool")
        rows, columns = len(prefixes) * branches, -(-max_suffix // pool.page_size)
        own = pool.allocate(rows * columns)
        self.branches, self.max_suffix = branches, max_suffix
        self._prefixes = [prefix.fork() for prefix in prefixes]
        self._own = [own[n * columns : (n + 1) * columns] for n in range(rows)]
        self.prefix_table = pool.table([prefix.pages for prefix in prefixes])
        self.suffix_table = pool.table(self._own)
        lengths = [prefix.length for prefix in prefixes]
        self.prefix_lens = torch.tensor(lengths, dtype=torch.int32, device=pool.device)
        self.suffix_lens = torch.zeros(rows, dtype=torch.int32, device=pool.device)
        tables = (self.prefix_table, self.prefix_lens, self.suffix_table, self.suffix_lens)
        for tensor in tables:
            torch._dynamo.mark_static_address(tensor, guard=False)

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write new keys [N, H, M, D] and values [N, H, M, Dv] of a layer behind each branch.

        In compiled code an in-place `index_put` of static shape. `advance` makes them count.

        Raises:
            ValueError: other shapes, or too many tokens for `max_suffix` (on a CPU in eager mode;
                elsewhere the index is out of range: an index error or a device-side assertion).
        """
        pools = (
            (self.pool.keys[layer], "k", k, self.pool.k_scale),
            (self.pool.values[layer], "v", v, self.pool.v_scale),
        )
        tokens = k.shape[2]
        for pages, name, states, _ in pools:
            expected = (self.suffix_lens.shape[0], pages.shape[1], tokens, pages.shape[3])
            if states.shape != expected:
                raise ValueError(f"{name} must be {list(expected)}, got {list(states.shape)}")
        self._check_room(tokens)
        places = self._places(tokens)
        column = (places // self.pool.page_size).long()
        page = self.suffix_table.gather(1, column)[:, None]
        slot = (places % self.pool.page_size)[:, None]
        head = torch.arange(k.shape[1], device=k.device)[:, None]
        for pages, _, states, scale in pools:
            pages.index_put_((page, head, slot), self.pool.stored(states, scale))

    def read(self, layer: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Keys [N, H, P*page_size + S*page_size, D] and values of every row, prefix first.

        Where a page is partly filled, or a table padded, the rest is arbitrary: `mask` hides it.

        Args:
            layer: the layer.
            dtype: of the result; needed for fp8 pages, where it is also multiplied by the scales.

        Raises:
            TypeError: no dtype is given and the pages are fp8.
        """
        stored = self.pool.keys[layer].dtype
        if stored == FP8 and dtype is None:
            raise TypeError(f"pages of {FP8} need a dtype to be read in, such as that of q")
        pools = (
            (self.pool.keys[layer], self.pool.k_scale),
            (
                self.pool.values[layer],
                self.pool.v_scale,
            ),
        )
        k, v = (self._read(pages, scale, dtype or stored) for pages, scale in pools)
        return k, v

    def _read(self, pages: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        prefix = _looked_up(pages, self.prefix_table).repeat_interleave(self.branches, 0)
        joined = torch.cat([prefix, _looked_up(pages, self.suffix_table)], 2).to(dtype)
        return joined if scale is None else joined * scale.to(dtype)[:, None, None]

    def mask(self, tokens: int) -> Tensor:
        """Which keys of `read` the `tokens` new queries see, bool [N, 1, tokens, keys].

        For queries whose keys are appended in this step: each sees its prefix, the branch's tokens
        and those of this step up to its own. Call it before `advance`.
        """
        size = self.pool.page_size
        prefix_keys, suffix_keys = (
            table.shape[1] * size for table in (self.prefix_table, self.suffix_table)
        )
        device = self.suffix_lens.device
        prefix = torch.arange(prefix_keys, device=device) < self.prefix_lens[:, None]
        key = torch.arange(suffix_keys, device=device)
        suffix = (key < (self.suffix_lens + tokens)[:, None])[:, None]
        if tokens > 1:
            suffix = suffix & (key <= self._places(tokens)[..., None])
        shared = prefix.repeat_interleave(self.branches, 0)[:, None].expand(-1, tokens, -1)
        return torch.cat([shared, suffix], 2)[:, None]

    def positions(self, tokens: int) -> Tensor:
        """Positions of the next tokens in their sequences (for RoPE), int64 [N, tokens]."""
        before = self.prefix_lens.repeat_interleave(self.branches, 0)
        return (before[:, None] + self._places(tokens)).long()

    def advance(self, tokens: int) -> None:
        """Count `tokens` appended tokens of every branch: once a step, after the last layer."""
        self.suffix_lens.add_(tokens)

    def reorder(self, rows: Tensor) -> None:
        """Let row n continue row `rows[n]` (int64 [N]), of the same request (beam search).

        Copies the pages of suffixes; a CPU in eager mode checks the requests.
        """
        if rows.device.type == "cpu" and not torch.compiler.is_compiling():
            own = torch.arange(rows.shape[0]) // self.branches
            if not torch.equal(rows // self.branches, own):
                raise ValueError(f"rows must stay within their request, got {rows.tolist()}")
        source = self.suffix_table[rows]
        for pages in (*self.pool.keys, *self.pool.values):
            pages.index_put_((self.suffix_table,), pages[source])
        self.suffix_lens.copy_(self.suffix_lens[rows])

    def sequence(self, row: int) -> PagedSequence:
        """A branch as a sequence of its own: shares the prefix's full pages, copies the rest.

        For the branch that is accepted: it can be the prefix of a next batch. Reads its length
        from the device.

        Raises:
            PoolExhaustedError: the pool has too few pages.
        """
        result = self._prefixes[row // self.branches].fork()
        start, tokens = result.length, int(self.suffix_lens[row])
        try:
            result.extend(tokens)
        except RuntimeError:
            result.free()
            raise
        suffix = PagedSequence(self.pool)  # a view: it holds no reference
        suffix.pages, suffix.length = self._own[row], tokens
        places = torch.arange(start, start + tokens, device=self.pool.device)
        size = self.pool.page_size
        page = torch.tensor(result.pages, device=self.pool.device)[places // size]
        for layer, (keys, values) in enumerate(zip(self.pool.keys, self.pool.values, strict=True)):
            for pages, states in zip((keys, values), suffix.read(layer), strict=True):
                pages[page, :, places % size] = states.transpose(0, 1)
        return result

    def reset(self) -> None:
        """Forget what the branches added: ready for other branches of the same prefixes."""
        self.suffix_lens.zero_()

    def free(self) -> None:
        """Give all pages back; the batch must not be used any more.

        Raises:
            ValueError: it was freed before.
        """
        if not self._own:
            raise ValueError("this batch was freed before")
        self.pool.free([page for row in self._own for page in row])
        for prefix in self._prefixes:
            prefix.free()
        self._own = []

    def _places(self, tokens: int) -> Tensor:
        """Places of the next tokens in each branch's suffix, int32 [N, tokens]."""
        device = self.suffix_lens.device
        return self.suffix_lens[:, None] + torch.arange(tokens, dtype=torch.int32, device=device)

    def _check_room(self, tokens: int) -> None:
        if torch.compiler.is_compiling() or self.suffix_lens.device.type != "cpu":
            return
        written = int(self.suffix_lens.max())
        if written + tokens > self.max_suffix:
            raise ValueError(
                f"a branch holds max_suffix={self.max_suffix} tokens: {written} are written, "
                f"{tokens} more do not fit"
            )


def _looked_up(pages: Tensor, table: Tensor) -> Tensor:
    """Pages [blocks, H, page_size, D] by a table [rows, columns] -> [rows, H, keys, D]."""
    return pages[table].transpose(1, 2).flatten(2, 3)
