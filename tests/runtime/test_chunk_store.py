"""What a ChunkStore keeps, where, and that it is found again and never changed."""

import threading

import pytest
import torch

pytest.importorskip("transformers")

from support.blending import cached_at, full_prefill, ids, twin
from support.hf_models import tiny_model
from support.tolerance import assert_close_to_reference

from torch_cascade import ChunkStore
from torch_cascade.runtime.fingerprint import fingerprint
from torch_cascade.runtime.rotation import RotationError

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return tiny_model("Llama", torch.float32)


def bytes_of(model, tokens):
    config = model.config
    per_layer = 2 * config.num_key_value_heads * config.head_dim * 4
    return config.num_hidden_layers * per_layer * tokens


def tiers(store, *chunks):
    """Where each chunk is found: looking makes it the most recently used."""
    return [store.blend([chunk, [5]]).report.parts[0].tier for chunk in chunks]


def looked_up(store, *chunks):
    """The same, but nothing is loaded: the caches are gone before the thread turns to them."""
    gate = threading.Event()
    store._reader.submit(gate.wait)
    found = tiers(store, *chunks)
    gate.set()
    store._reader.submit(lambda: None).result()
    return found


def test_least_recently_used_leave_first(model):
    a, b, c, d = (ids(n) for n in (8, 9, 10, 11))
    store = ChunkStore(model, cpu_bytes=bytes_of(model, 27))
    for chunk in (a, b, c):
        store.add(chunk)
    assert tiers(store, a) == ["cpu"]  # now b is the oldest
    store.add(d)
    assert tiers(store, b, c, a, d) == ["fresh", "fresh", "cpu", "cpu"]
    report = store.report()
    assert (report.tiers[0].chunks, report.tiers[0].nbytes) == (2, bytes_of(model, 19))
    assert report.misses == 2 + 5 and "2 chunks" in str(report)  # five times the question


def test_disk_keeps_what_memory_drops_and_gives_it_back(model, tmp_path):
    a, b, c = ids(8), ids(9), ids(10)
    store = ChunkStore(model, cpu_bytes=bytes_of(model, 17), folder=tmp_path)
    for chunk in (a, b, c):
        store.add(chunk)
    assert looked_up(store, c, a) == ["cpu", "disk"]
    blended = store.blend([a, [5]])
    assert blended.report.parts[0].tier == "disk"
    for layer in range(2):
        cached_at(blended, layer, 0)  # waits until it is read
    store._reader.submit(lambda: None).result()
    assert looked_up(store, a, c, b) == ["cpu", "disk", "disk"]
    assert [t.name for t in store.report().tiers] == ["cpu", "disk"]


def test_the_disk_has_a_budget_too(model, tmp_path):
    chunks = [ids(n) for n in (8, 9, 10)]
    size = ChunkStore(model, folder=tmp_path / "one")
    size.add(chunks[2])
    largest = size.report().tiers[1].nbytes
    store = ChunkStore(model, cpu_bytes=0, disk_bytes=2 * largest, folder=tmp_path / "two")
    store.add(chunks[0]), store.add(chunks[1])
    assert tiers(store, chunks[0]) == ["disk"]
    store.add(chunks[2])
    assert tiers(store, *chunks) == ["disk", "fresh", "disk"]
    unlimited = ChunkStore(model, cpu_bytes=0, disk_bytes=1, folder=tmp_path / "three")
    unlimited.add(chunks[0])  # larger than everything: nowhere, and computed when it is needed
    assert tiers(unlimited, chunks[0]) == ["fresh"]


def test_every_tier_gives_the_same(model, tmp_path):
    """Memory, disk, a disk read by another store, compiled or not."""
    a, b, question = ids(9), ids(13), ids(7)
    memory = ChunkStore(model)
    disk = ChunkStore(model, cpu_bytes=0, folder=tmp_path)
    for store in (memory, disk):
        store.add(a), store.add(b)
    again = ChunkStore(model, cpu_bytes=0, folder=tmp_path)
    parts = [[b, a, question], [a, b]]
    wanted = memory.blend(parts).past_key_values
    for store in (disk, again):
        blended = store.blend(parts)
        assert set(blended.report.nbytes) == {"disk"}
        for layer in range(2):
            for got, kept in zip(
                blended.past_key_values.rotated(layer), wanted.rotated(layer), strict=True
            ):
                assert torch.equal(got, kept)


@pytest.mark.parametrize("prefilled_in", [True, False])
@pytest.mark.parametrize("blended_in", [True, False])
def test_what_is_loaded_serves_in_inference_mode_and_out_of_it(
    blended_in, prefilled_in, model, tmp_path
):
    """Also what is kept of it for the next prompt."""
    a, question = ids(9), ids(7)
    ChunkStore(model, folder=tmp_path).add(a)
    store = ChunkStore(model, folder=tmp_path)
    found = []
    for mode in (blended_in, not blended_in):
        with torch.inference_mode(mode):
            blended = store.blend([question, a, question])
        found += blended.report.nbytes
        with torch.inference_mode(prefilled_in), torch.no_grad():
            keys, values = blended.past_key_values.rotated(1)
            forward = torch.compile(model, backend="eager")
            got = forward(**blended, logits_to_keep=1).logits
            wanted = full_prefill(model, [*question, *a, *question])[0][-1:]
        torch.testing.assert_close(got[0], wanted)
        assert keys[0, :, 7:16].any() and values[0, :, 7:16].any()
        store._reader.submit(lambda: None).result()  # what was read is kept
    assert found == ["disk", "cpu"]


def test_loading_goes_on_while_the_graph_runs(model, tmp_path):
    """Each layer's data is waited for in the graph, and only that layer's."""
    a, b, question = ids(9), ids(13), ids(7)
    store = ChunkStore(model, cpu_bytes=0, folder=tmp_path)
    store.add(a), store.add(b)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    forward = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for parts in ([a, b, question], [b, a, b, question]):
        gate = threading.Event()
        store._reader.submit(gate.wait)
        blended = store.blend(parts)
        assert not blended.past_key_values._loading._done[0].done()
        threading.Timer(0.05, gate.set).start()
        with torch.no_grad():
            got = forward(**blended, logits_to_keep=1).logits
            wanted = model(**store.blend(parts), logits_to_keep=1).logits
        torch.testing.assert_close(got, wanted)
    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("take_kv" in target for target in targets) == 2
    order = [t for t in targets if "take_kv" in t or "scaled_dot_product" in t]
    assert ["take" in t for t in order] == [True, False, True, False]


def test_what_is_stored_never_changes(model):
    a, b, question = ids(9), ids(13), ids(7)
    store = ChunkStore(model)
    store.add(a), store.add(b)
    (tier,) = store._shelf.tiers
    content = [s for chunk in tier._chunks.values() for pair in chunk.layers for s in pair]
    before = [states.clone() for states in content]
    forward = torch.compile(model, backend="eager")
    for parts, run in (([a, b, question], forward), ([[a, question], [b, a]], model), ([b], model)):
        blended = store.blend(parts)
        with torch.no_grad():
            run(**blended)
        for layer in blended.past_key_values.layers:
            layer.keys.fill_(7.0), layer.values.fill_(7.0)
    assert len(content) == 8
    assert all(torch.equal(x, y) for x, y in zip(content, before, strict=True))


def test_context_decides_and_is_recorded(model):
    """B cached after A is exact after A, and differs after C."""
    a, b, c, question = ids(9), ids(13), ids(9), ids(7)
    store = ChunkStore(model)
    assert store.add(b, context=a) != ChunkStore(model).add(b)
    exact = twin(model)
    for before, same in ((a, True), (c, False)):
        row = before + b + question
        blended = store.blend([before, b, question])
        part = blended.report.parts[1]
        assert (part.reused, part.exact) == (len(b), same)
        fresh = full_prefill(model, row)[1].layers[1]
        reference = full_prefill(exact, row)[1].layers[1]
        keys, values = cached_at(blended, 1, 0)
        span = slice(len(before), len(before) + len(b))
        if same:
            assert_close_to_reference(keys, fresh.keys[0, :, span], reference.keys[0, :, span])
            assert_close_to_reference(
                values, fresh.values[0, :, span], reference.values[0, :, span]
            )
        else:
            assert (keys - fresh.keys[0, :, span]).abs().max() > 0.01
    store.add(b)
    assert store.blend([c, b, question]).report.parts[1].reused == len(b)
    names = {layer for layer in (store.add(b), store.add(b, context=a), store.add(b, context=c))}
    assert len(names) == 3


def test_every_token_is_from_one_place(model):
    """A prefix, chunks that it covers in part elsewhere, and a gap: each row loaded once."""
    a, b = ids(6), ids(6)
    prefix, question = a + b[:4], ids(7)
    store = ChunkStore(model)
    for chunk in (a, b, prefix):
        store.add(chunk)
    blended = store.blend([prefix, b[4:], a, b, question])
    chunks = blended.past_key_values.layers[0].reuse.chunks[0].tolist()
    assert chunks == [0] * 10 + [-1] * 2 + [1] * 6 + [2] * 6 + [-1] * 7
    fresh = blended.past_key_values.layers[0].reuse.fresh_rows[0].tolist()
    assert fresh == [10, 11, *range(24, 31)]
    assert [part.exact for part in blended.report.parts] == [True, False, False, False, False]
    assert blended.report.reused == 22 and blended.report.tokens == 31
    assert "22 of 31 tokens" in str(blended.report)


def test_threads_add_and_blend(model):
    chunks = [ids(n) for n in (8, 9, 10, 11)]
    question = ids(7)
    store = ChunkStore(model, cpu_bytes=bytes_of(model, 30))
    wanted = {n: full_prefill(model, chunks[n] + question)[0][-1] for n in range(4)}
    errors = []

    def work(seed):
        try:
            for step in range(6):
                n = (seed + step) % 4
                name = store.add(chunks[n])
                assert name == store.add(torch.tensor(chunks[n]))
                with torch.no_grad():
                    logits = model(**store.blend([chunks[n], question])).logits[0, -1]
                assert torch.equal(logits, wanted[n])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.report().tiers[0].nbytes <= bytes_of(model, 30)


def test_weights_and_configuration_are_the_identity(model):
    other = tiny_model("Llama", torch.float32)
    names = {
        "same": fingerprint(model),
        "bfloat16": fingerprint(tiny_model("Llama", torch.bfloat16)),
        "weights": fingerprint(other),
    }
    assert names["same"] == fingerprint(torch.compile(model)._orig_mod)
    assert len(set(names.values())) == 3
    base = fingerprint(other)
    other.config.rms_norm_eps *= 2
    assert fingerprint(other) != base
    other.config.rms_norm_eps /= 2
    with torch.no_grad():
        weight = other.model.layers[1].mlp.up_proj.weight
        weight[[3, 60]] = weight[[60, 3]]
    assert fingerprint(other) != base


def test_nothing_is_compiled_for_the_store():
    model = tiny_model("Llama", torch.float32)
    model.forward = torch.compile(model.forward, backend="eager")
    store = ChunkStore(torch.compile(model, backend="eager"))
    store.add(ids(5))
    store.blend([ids(5)])
    assert not torch._dynamo.utils.counters["stats"]


def written(model):
    with torch.no_grad():
        model.model.norm.weight.mul_(2)


def replaced(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [written, replaced, lambda model: model.bfloat16()])
def test_changed_weights_are_noticed(change):
    model = tiny_model("Llama", torch.float32)
    store, a = ChunkStore(model), ids(5)
    store.add(a)
    change(model)
    for call in (lambda: store.add(ids(4)), lambda: store.blend([a])):
        with pytest.raises(RuntimeError, match="weights have changed or moved"):
            call()


def test_weights_made_in_inference_mode():
    """They do not say that they were written; what is asked of every prompt must not fail of it."""
    with torch.inference_mode():
        model = tiny_model("Llama", torch.float32)
    store, a = ChunkStore(model), ids(5)
    store.add(a)
    assert store.blend([a, [5]]).report.reused == 5
    with torch.inference_mode():
        model.model.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weights have changed or moved"):
        store.add(ids(4))


def test_a_second_beginning_of_sequence_is_pointed_out(model):
    a, question = [model.config.bos_token_id, *ids(5)], ids(3)
    store = ChunkStore(model)
    store.add(a)
    store.blend([a, question])
    with pytest.warns(UserWarning, match="part 1 of prompt 1 starts with the beginning"):
        store.blend([[a, question], [question, a]])


WRONG = {
    "parts must be a list": (TypeError, lambda s: s.blend("text")),
    "part 1 of prompt 0 must be token ids, got str": (TypeError, lambda s: s.blend([[5], "text"])),
    "parts must hold at least one": (ValueError, lambda s: s.blend([])),
    "part 1 of prompt 0 holds no tokens": (ValueError, lambda s: s.blend([[5], []])),
    "all lists of parts": (TypeError, lambda s: s.blend([[[5], [6]], [7]])),
    "got one of float": (TypeError, lambda s: s.blend([[5.0]])),
    "holds the id -1": (ValueError, lambda s: s.blend([[-1]])),
    "a tensor of torch.float32": (TypeError, lambda s: s.add(torch.ones(3))),
    "must be .tokens. or .1, tokens., got .2, 3.": (
        ValueError,
        lambda s: s.add(torch.ones(2, 3, dtype=torch.int64)),
    ),
    "the model has 101 token ids, got 101": (ValueError, lambda s: s.add([5, 101])),
    "the model has 101 token ids, got 102": (ValueError, lambda s: s.blend([[5, 102]])),
    "padding_side must be one of": (ValueError, lambda s: s.blend([[5]], padding_side="up")),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_parts(message, model):
    error, call = WRONG[message]
    with pytest.raises(error, match=message):
        call(ChunkStore(model))


def test_wrong_stores(model, tmp_path):
    for message, error, options in (
        ("the model is on the CPU", ValueError, {"gpu_bytes": 5}),
        ("cpu_bytes must not be negative", ValueError, {"cpu_bytes": -1}),
        ("disk_bytes must be an integer", TypeError, {"disk_bytes": 1.5, "folder": tmp_path}),
        ("but no folder", ValueError, {"disk_bytes": 5}),
        ("nothing can be kept", ValueError, {"cpu_bytes": 0}),
        ("device=cuda, but the model is on cpu", ValueError, {"device": "cuda"}),
    ):
        with pytest.raises(error, match=message):
            ChunkStore(model, **options)
    with pytest.raises(RotationError, match="learned positions"):
        ChunkStore(tiny_model("GPT2", torch.float32))
    gptj = ChunkStore(tiny_model("GPTJ", torch.float32))
    chunk = ids(40)
    gptj.add(chunk)
    with pytest.raises(ValueError, match="64 positions, not 80"):
        gptj.blend([chunk, chunk])
    with pytest.raises(ValueError, match="64 positions, not 80"):
        gptj.add(chunk, context=chunk)


def test_weights_written_past_torch_are_noticed_before_a_chunk_is_named():
    """`.data` leaves no trace but the weights; a folder would hold them under a wrong name."""
    model = tiny_model("Llama", torch.float32)
    store = ChunkStore(model)
    store.add(ids(5))
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data[3, 5] += 0.5
    with pytest.raises(RuntimeError, match="weights have changed"):
        store.add(ids(6))
    weight.data[3, 5] -= 0.5
    model.model.embed_tokens.weight.data[[3, 90]] = model.model.embed_tokens.weight.data[[90, 3]]
    with pytest.raises(RuntimeError, match="weights have changed"):
        store.add(ids(6))
    assert store.report().tiers[0].chunks == 1


def test_a_chunk_under_autocast_is_another(tmp_path):
    """Its keys have another dtype, which a forward without autocast cannot use, nor replace."""
    model, a, question = tiny_model("Llama", torch.float32), ids(9), ids(4)
    store = ChunkStore(model, folder=tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        name = store.add(a)
    assert store.blend([a, question]).report.reused == 0
    assert store.add(a) != name
    with torch.no_grad():
        logits = model(**store.blend([a, question])).logits[0]
    assert torch.equal(logits, full_prefill(model, a + question)[0])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        blended = store.blend([a, question])
        assert blended.report.reused == len(a)
        model(**blended)
    again = ChunkStore(model, folder=tmp_path)
    assert again.blend([a, question]).past_key_values.rotated(0)[0].dtype == torch.float32


def test_a_chunk_too_large_for_every_budget_is_said(model, tmp_path):
    store = ChunkStore(model, cpu_bytes=100, folder=tmp_path, disk_bytes=100)
    with pytest.warns(UserWarning, match="larger than every budget, and is not kept"):
        store.add(ids(9))
    assert store.blend([ids(9), [5]]).report.reused == 0
