"""How cached chunks come to stand side by side: bit for bit, and in few ops."""

from collections import Counter

import pytest
import torch

pytest.importorskip("transformers")

from support.blending import ids
from support.hf_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from torch_cascade import ChunkStore
from torch_cascade.runtime.chunk_files import ChunkFolder
from torch_cascade.runtime.chunk_joining import assemble
from torch_cascade.runtime.chunk_parts import lay_out
from torch_cascade.runtime.chunk_plan import make_plan
from torch_cascade.runtime.chunks import Chunk, ChunkKey

LAYERS, HEADS, FEATURES, VALUES = 3, 2, 4, 6


class Ops(TorchDispatchMode):
    """Counts ops, and looks at what is concatenated."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.joined = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        if func in (torch.ops.aten.cat.default, torch.ops.aten.cat.out):
            self.joined += [x for x in args[0] if x.dim() == 4]
        return func(*args, **(kwargs or {}))


def chunk_of(tokens, *, values=VALUES, dtype=torch.float32):
    def states(features):
        return torch.randn(HEADS, len(tokens), features, dtype=dtype)

    layers = tuple((states(FEATURES), states(values)) for _ in range(LAYERS))
    return Chunk(ChunkKey("model", tuple(tokens)), (), layers)


def plan_of(rows, chunks, side="left"):
    layout = lay_out([[tuple(part) for part in row] for row in rows], side)
    by_ids = {chunk.key.ids: chunk for chunk in chunks}
    return make_plan(layout, [[by_ids.get(part) for part in row] for row in layout.rows])


def expected(rows, chunks, side, layer, index):
    """Token by token; the last of a prompt is not cached."""
    by_ids = {chunk.key.ids: chunk for chunk in chunks}
    lengths = [sum(map(len, row)) for row in rows]
    features = chunks[0].layers[0][index].shape[2]
    wanted = torch.zeros(len(rows), HEADS, max(lengths), features)
    for n, row in enumerate(rows):
        place = max(lengths) - lengths[n] if side == "left" else 0
        last = place + lengths[n] - 1
        for part in row:
            for t in range(len(part)):
                if tuple(part) in by_ids and place != last:
                    wanted[n, :, place] = by_ids[tuple(part)].layers[layer][index][:, t]
                place += 1
    return wanted


A, B, C, NEW, QUESTION = [1, 2, 3], [4, 5, 6, 7, 8], [9], [20, 21], [30, 31, 32, 33]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "rows",
    [
        [[A, B, C, QUESTION]],
        [[NEW, A, NEW, B, A, QUESTION]],
        [[QUESTION, B]],
        [[B], [A, NEW, C], [QUESTION, NEW, QUESTION], [A, B, A]],
    ],
)
def test_every_token_has_the_bits_of_its_chunk(rows, side):
    chunks = [chunk_of(tokens) for tokens in (A, B, C)]
    before = [x.clone() for chunk in chunks for pair in chunk.layers for x in pair]
    made = assemble(plan_of(rows, chunks, side), LAYERS, torch.device("cpu"))
    for layer, pair in enumerate(made):
        for index, states in enumerate(pair):
            assert torch.equal(states, expected(rows, chunks, side, layer, index))
            states.fill_(7.0)
    after = [x for chunk in chunks for pair in chunk.layers for x in pair]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("rows", [[[A, NEW, B, QUESTION]], [[QUESTION, A], [B, NEW]]])
def test_tensors_are_what_fast_kernels_and_few_guards_want(rows):
    """CUDA's `cat` moves single elements of what is not contiguous; Dynamo guards offsets."""
    chunks = [chunk_of(tokens, values=FEATURES) for tokens in (A, B)]
    plan = plan_of(rows, chunks)
    with Ops() as ops:
        made = assemble(plan, LAYERS, torch.device("cpu"))
    assert ops.joined and all(x.is_contiguous() for x in ops.joined)
    states = [x for pair in made for x in pair]
    assert len({x.untyped_storage().data_ptr() for x in states}) == 2 * LAYERS
    assert all(x.is_contiguous() and x.storage_offset() == 0 for x in states)
    assert not any(x._is_view() for x in states)


def test_dtypes_do_not_mix():
    chunks = [chunk_of(A), chunk_of(B, dtype=torch.bfloat16)]
    plan = plan_of([[A, B, QUESTION]], chunks)
    with pytest.raises(ValueError, match=r"different dtypes.*torch\.bfloat16"):
        assemble(plan, LAYERS, torch.device("cpu"))


def test_dtypes_do_not_mix_where_chunks_are_loaded_either(tmp_path):
    """Writing them to one buffer would convert some."""
    model, (a, b) = tiny_model("Llama", torch.float32), (ids(5), ids(6))
    store = ChunkStore(model, folder=tmp_path, cpu_bytes=0)
    store.add(a), store.add(b)
    folder, key = store._shelf.folder, ChunkKey(store._fingerprint, tuple(b))
    file = folder.open(key, store._tables)
    layers = tuple((k, v.bfloat16()) for k, v in map(file.layer, range(2)))
    folder.write(Chunk(key, file.tables, layers))
    with pytest.raises(ValueError, match=r"different dtypes.*torch\.bfloat16"):
        store.blend([a, b, [5]])


def test_inputs_of_a_prompt_are_no_views():
    """Of what they would be views of, compilers would have to be told, too."""
    store, a = ChunkStore(tiny_model("Llama", torch.float32)), ids(5)
    store.add(a)
    blended = store.blend([a, [5, 6]])
    reuse = blended.past_key_values.layers[0].reuse
    assert not any(x._is_view() for x in (blended.input_ids, reuse.fresh_rows, reuse.chunks))


def test_a_file_says_its_dtypes_without_being_read(tmp_path):
    single, half = chunk_of(A), chunk_of(A, dtype=torch.bfloat16)
    mixed = tuple((k, v) for (k, _), (_, v) in zip(single.layers, half.layers, strict=True))
    chunk = Chunk(single.key, (), mixed)
    folder = ChunkFolder(tmp_path, None)
    folder.write(chunk)
    file = folder.open(chunk.key, ())
    assert file.dtypes == chunk.dtypes == ((torch.float32, torch.bfloat16),) * LAYERS


def ops_of(layers, parts):
    model = tiny_model("Llama", torch.float32, num_hidden_layers=layers)
    store = ChunkStore(model)
    for part in parts:
        store.add(part)
    prompt = [*parts, [5]]
    store.blend(prompt)  # what is made once for a chunk is made
    with Ops() as ops:
        store.blend(prompt)
    return ops.counts.total()


def test_ops_of_a_prompt_grow_with_its_layers_only():
    """Each is time to the first token: one for the keys of a layer and one for its values."""
    few, many = ([ids(3 + n) for n in range(count)] for count in (2, 14))
    base = ops_of(2, few)
    assert ops_of(5, few) == base + 2 * 3
    assert ops_of(2, many) == base
