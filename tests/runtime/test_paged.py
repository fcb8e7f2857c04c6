"""`PagePool` and `PagedSequence`: references, copy on write, errors."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from torch_cascade.runtime.paged import PagedSequence, PagePool, PoolExhaustedError
from torch_cascade.runtime.paged_branches import PagedBranches

HEADS, DIM, LAYERS = 2, 3, 2


def pool(blocks: int = 12, page_size: int = 4, **options) -> PagePool:
    return PagePool(LAYERS, blocks, HEADS, page_size, DIM, **options)


class Model(RuleBasedStateMachine):
    """A pool against plain lists: every sequence always reads what was written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(blocks=9, page_size=3)
        self.sequences: list[tuple[PagedSequence, list[float]]] = []
        self.batches: list[tuple[PagedBranches, list[list[float]]]] = []
        self.next = 1.0

    def fresh(self, count: int) -> list[float]:
        self.next += count
        return [self.next - i for i in range(count)]

    @staticmethod
    def states(content: list[float]) -> torch.Tensor:
        return torch.tensor(content).view(1, -1, 1).expand(HEADS, -1, DIM)

    @rule()
    def create(self) -> None:
        self.sequences.append((self.pool.sequence(), []))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99), count=st.integers(0, 7))
    def extend(self, which: int, count: int) -> None:
        sequence, content = self.sequences[which % len(self.sequences)]
        before = list(sequence.pages), sequence.length, self.pool.free_pages
        try:
            sequence.extend(count)
        except PoolExhaustedError:
            assert before == (sequence.pages, sequence.length, self.pool.free_pages)
            return
        new = self.fresh(count)
        for layer in range(LAYERS):
            states = self.states(new) + layer
            sequence.write(layer, states, -states, start=len(content))
        content += new

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        sequence, content = self.sequences[which % len(self.sequences)]
        self.sequences.append((sequence.fork(), list(content)))

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 99))
    def free(self, which: int) -> None:
        sequence, _ = self.sequences.pop(which % len(self.sequences))
        sequence.free()

    @precondition(lambda self: any(content for _, content in self.sequences))
    @rule(which=st.integers(0, 99), branches=st.integers(1, 3))
    def branch(self, which: int, branches: int) -> None:
        filled = [pair for pair in self.sequences if pair[1]]
        sequence, content = filled[which % len(filled)]
        free = self.pool.free_pages
        try:
            batch = PagedBranches([sequence], branches, max_suffix=2)
        except PoolExhaustedError:
            assert self.pool.free_pages == free
            return
        self.batches.append((batch, [list(content) for _ in range(branches)]))

    @precondition(lambda self: self.batches)
    @rule(which=st.integers(0, 99))
    def append(self, which: int) -> None:
        batch, contents = self.batches[which % len(self.batches)]
        if int(batch.suffix_lens[0]) == 2:
            return
        new = self.fresh(len(contents))
        for layer in range(LAYERS):
            states = torch.tensor(new).view(-1, 1, 1, 1).expand(-1, HEADS, 1, DIM) + layer
            batch.append(layer, states, -states)
        batch.advance(1)
        for content, token in zip(contents, new, strict=True):
            content.append(token)

    @precondition(lambda self: self.batches)
    @rule(which=st.integers(0, 99), row=st.integers(0, 9))
    def accept(self, which: int, row: int) -> None:
        batch, contents = self.batches[which % len(self.batches)]
        free = self.pool.free_pages
        try:
            sequence = batch.sequence(row % len(contents))
        except PoolExhaustedError:
            assert self.pool.free_pages == free
            return
        self.sequences.append((sequence, list(contents[row % len(contents)])))

    @precondition(lambda self: self.batches)
    @rule(which=st.integers(0, 99))
    def drop(self, which: int) -> None:
        batch, _ = self.batches.pop(which % len(self.batches))
        batch.free()

    @invariant()
    def everyone_reads_their_own(self) -> None:
        for sequence, content in self.sequences:
            assert sequence.length == len(content)
            for layer in range(LAYERS):
                k, v = sequence.read(layer)
                assert torch.equal(k, self.states(content) + layer)
                assert torch.equal(v, -k)
        for batch, contents in self.batches:
            k, _ = batch.read(1)
            for n, content in enumerate(contents):
                seen = k[n, :, visible(batch)[n]]
                assert torch.equal(seen, self.states(content) + 1)

    @invariant()
    def references_add_up(self) -> None:
        held = [page for sequence, _ in self.sequences for page in sequence.pages]
        for batch, _ in self.batches:
            columns = -(-batch.prefix_lens[0] // self.pool.page_size)
            held += batch.prefix_table[0, :columns].tolist()
            held += batch.suffix_table.flatten().tolist()
            own = batch.suffix_table.flatten().tolist()
            assert all(self.pool.references(page) == 1 for page in own), "a page of two writers"
        counts = [self.pool.references(page) for page in range(self.pool.blocks)]
        assert counts == [held.count(page) for page in range(self.pool.blocks)]
        assert self.pool.free_pages == counts[1:].count(0)
        assert not self.pool.keys[0][0].any(), "page 0 was written"


def visible(batch: PagedBranches) -> torch.Tensor:
    """Keys of `read` that count, bool [N, keys]."""
    return batch.mask(1)[:, 0, 0].logical_and(_written(batch))


def _written(batch: PagedBranches) -> torch.Tensor:
    """All prefix keys, and those suffix keys that were advanced over."""
    size = batch.pool.page_size
    prefix, suffix = (t.shape[1] * size for t in (batch.prefix_table, batch.suffix_table))
    own = torch.arange(suffix) < batch.suffix_lens[:, None]
    return torch.cat([torch.ones(len(own), prefix, dtype=torch.bool), own], 1)


Model.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestModel = Model.TestCase


def test_a_shared_partial_page_is_copied_by_whoever_writes_first():
    made = pool()
    first = made.sequence()
    first.extend(6)
    for layer in range(LAYERS):
        states = torch.randn(HEADS, 6, DIM)
        first.write(layer, states, -states)
    second = first.fork()
    assert second.pages == first.pages
    second.extend(1)
    assert second.pages[0] == first.pages[0] and second.pages[1] != first.pages[1]
    assert [made.references(page) for page in (*first.pages, second.pages[1])] == [2, 1, 1]
    first.extend(1)  # nobody else holds its last page now: no copy
    assert made.free_pages == 11 - 3


def test_a_full_page_is_shared_for_good():
    first = pool().sequence()
    first.extend(8)
    second = first.fork()
    second.extend(1)
    assert second.pages[:2] == first.pages and len(second.pages) == 3


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"page_size": 0}, ValueError, "page_size must be from 1 to 256, got 0"),
        ({"page_size": 257}, ValueError, "page_size must be from 1 to 256, got 257"),
        ({"page_size": 4.0}, TypeError, "page_size must be an integer, got 4.0"),
        ({"blocks": 1}, ValueError, "blocks must be at least 2, got 1"),
        ({"layers": 0}, ValueError, "layers must be at least 1, got 0"),
        ({"dtype": torch.int8}, TypeError, "dtype must be one of"),
        ({"k_scale": torch.ones(2)}, ValueError, "k_scale is for pages of torch.float8_e4m3fn"),
        (
            {"dtype": torch.float8_e4m3fn, "v_scale": torch.ones(3)},
            ValueError,
            r"v_scale must be float32 \[kv_heads\] = \[2\], got torch.float32 \[3\]",
        ),
    ],
)
def test_arguments_are_checked(change, error, text):
    given = {"layers": 1, "blocks": 4, "kv_heads": 2, "page_size": 4, "head_dim": 8} | change
    with pytest.raises(error, match=text):
        PagePool(**given)


def test_pages_are_accounted_for():
    made = pool(blocks=4)
    pages = made.allocate(2)
    with pytest.raises(PoolExhaustedError, match="2 pages are needed and 1 of 3 are free"):
        made.allocate(2)
    made.retain(pages[:1])
    made.free(pages)
    with pytest.raises(ValueError, match=f"page {pages[1]} is not allocated"):
        made.free(pages)
    assert made.references(pages[0]) == 1, "a refused call changes nothing"
    with pytest.raises(ValueError, match="is not allocated"):
        made.free([pages[0], pages[0]])
    made.free(pages[:1])
    assert made.free_pages == 3
    for wrong in (0, -1, 4):
        with pytest.raises(ValueError, match="is not allocated"):
            made.retain([wrong])


def test_writes_are_checked():
    sequence = pool().sequence()
    sequence.extend(5)
    states = torch.zeros(HEADS, 5, DIM)
    with pytest.raises(ValueError, match=r"tokens \[1, 6\) are outside of a sequence of 5"):
        sequence.write(0, states, states, start=1)
    with pytest.raises(ValueError, match=r"v must be \[2, 5, 3\], got \[2, 4, 3\]"):
        sequence.write(0, states, states[:, 1:])
    other = sequence.fork()
    with pytest.raises(ValueError, match="held by others too"):
        other.write(0, states, states)


def test_fp8_pages_hold_states_divided_by_their_scale():
    scale = torch.tensor([0.5, 8.0])
    made = pool(dtype=torch.float8_e4m3fn, k_scale=scale)
    sequence = made.sequence()
    sequence.extend(3)
    k, v = torch.full((HEADS, 3, DIM), 1000.0), torch.full((HEADS, 3, DIM), 1000.0)
    sequence.write(0, k, v)
    stored_k, stored_v = sequence.read(0)
    assert stored_k.dtype == torch.float8_e4m3fn
    # 1000 / 0.5 is above the largest fp8 number, 448; 1000 / 8 = 125 rounds to 128.
    assert stored_k.float()[:, 0, 0].tolist() == [448.0, 128.0]
    assert stored_v.float().unique().tolist() == [448.0]


def test_batches_are_checked():
    made = pool()
    prompt = made.sequence()
    with pytest.raises(ValueError, match="at least one token"):
        PagedBranches([prompt], 2, 2)
    prompt.extend(1)
    other = pool().sequence()
    other.extend(1)
    with pytest.raises(ValueError, match="one pool"):
        PagedBranches([prompt, other], 2, 2)
    with pytest.raises(ValueError, match="branches must be at least 1, got 0"):
        PagedBranches([prompt], 0, 2)
    with pytest.raises(PoolExhaustedError):
        PagedBranches([prompt], 11, 2)
    assert made.references(prompt.pages[0]) == 1
    batch = PagedBranches([prompt], 2, 2)
    states = torch.zeros(2, HEADS, 3, DIM)
    with pytest.raises(ValueError, match="0 are written, 3 more do not fit"):
        batch.append(0, states, states)
    with pytest.raises(ValueError, match=r"k must be \[2, 2, 3, 3\], got \[1, 2, 3, 3\]"):
        batch.append(0, states[:1], states)
    with pytest.raises(ValueError, match="rows must stay within their request"):
        batch.reorder(torch.tensor([1, 2]))
    batch.free()
    with pytest.raises(ValueError, match="freed before"):
        batch.free()
    assert made.references(prompt.pages[0]) == 1 and made.free_pages == 10


def test_beams_move_with_their_tokens():
    made = pool(blocks=20)
    prompt = made.sequence()
    prompt.extend(3)
    batch = PagedBranches([prompt], 3, 6)
    states = torch.arange(3.0).view(3, 1, 1, 1).expand(3, HEADS, 5, DIM)
    batch.append(1, states, -states)
    batch.suffix_lens += torch.tensor([1, 5, 3])
    tables = copy.deepcopy(batch.suffix_table)
    batch.reorder(torch.tensor([2, 2, 0]))
    assert batch.suffix_lens.tolist() == [3, 3, 1]
    assert torch.equal(tables, batch.suffix_table)
    k, _ = batch.read(1)
    assert k[:, 0, 4, 0].tolist() == [2.0, 2.0, 0.0]
