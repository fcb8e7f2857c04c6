"""What is not blended: the whole prompt is computed instead, with a reason; or it is an error."""

import copy

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.blend_plain import WIDTH, Plain, T, compiled, inputs
from support.capture import joint_graph
from support.tolerance import assert_close_to_reference
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils._pytree import tree_map_only

from torch_cascade import explain, reuse_kv
from torch_cascade.compiler.capture import capture
from torch_cascade.compiler.graph import Sizes
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pass_base import PassContext
from torch_cascade.compiler.record import Compilation
from torch_cascade.compiler.report import Reason
from torch_cascade.passes import blend, blend_emit
from torch_cascade.passes.blend import BlendPass


def assert_declined(model, args, reason, detail="", **options):
    """Computed in full, with this reason; an error under strict."""
    got, record = compiled(model, *args, **options)
    with torch.no_grad():
        eager, exact = model(*args), model.double()(*_double(args))
    model.float()
    assert record.declined.reason is reason, record.declined
    assert detail in str(record.declined)
    assert set(record.layers) == {"computed"}
    assert_close_to_reference(got, eager, exact)
    with pytest.raises(Exception, match=f"no cached keys and values were reused: {reason.value}"):
        compiled(model, *args, strict=True, **options)


def _double(args):
    def double(x):
        return x.double() if x.is_floating_point() else x

    return tree_map_only(torch.Tensor, double, args)


MASK = torch.arange(T)[:, None] > 3
FEATURES = torch.arange(WIDTH).expand(1, 1, WIDTH) % T

ALL = {
    "logits of all tokens": (lambda x: x * 2, "all of them"),
    "the first tokens": (lambda x: x[:, :3], "takes others"),
    "a piece in the middle": (lambda x: x[:, 2:5], "takes others"),
    "tokens by a mask": (lambda x: torch.where(MASK, x, 0), "all of them"),
    "features by an index": (lambda x: x.gather(1, FEATURES), "all of them"),
    "a piece of a split": (lambda x: x.split(7, 1)[0], "takes others"),
    "the last, and a mean": (lambda x: x[:, -1] + x.mean(1), "all of them"),
}


@pytest.mark.parametrize("name", ALL)
def test_results_of_all_tokens_are_an_error(name):
    then, detail = ALL[name]
    model, args = Plain(then=then), inputs()
    with pytest.raises(Exception, match="logits_to_keep=1") as error:
        compiled(model, *args)
    assert "CascadeError" in str(error.value) and detail in str(error.value)
    assert "passes=cascade" in str(error.value)
    with torch.no_grad():
        assert explain(model, *args).compilations[0].blend is not None
    _, record = compiled(model, *args, passes="cascade")
    assert record is None


EXITS = {
    "slice": (lambda x: x[:, -1:], 0),
    "slice in all dims": (lambda x: x[:, -1:, :], 0),
    "two": (lambda x: x[:, -2:], 1),
    "select": (lambda x: x[:, -1], 0),
    "select after dots": (lambda x: x[..., -1, :], 0),
    "from a number": (lambda x: x[:, T - 3 :], 2),
    "second to last": (lambda x: x[:, -2], 1),
    "a token by its number": (lambda x: x[:, 5], T - 6),
    "several": (lambda x: (x[:, -1], x[:, -3:].sum(1), x[:, -1:].relu()), 2),
    "narrow": (lambda x: x.narrow(1, -1, 1), 0),
    "unbind": (lambda x: x.unbind(1)[-1], 0),
    "split": (lambda x: x.split([T - 2, 2], 1)[1], 1),
    "chunk": (lambda x: x.chunk(7, 1)[-1], 1),
    "tensor_split": (lambda x: x.tensor_split([T - 1], 1)[1], 0),
    "list": (lambda x: x[:, [-1]], 0),
    "list of two": (lambda x: x[:, [-3, -1]], 2),
    "tensor": (lambda x: x[:, torch.tensor([T - 1])], 0),
    "tokens anywhere, twice": (lambda x: x[:, torch.tensor([[3, 5], [5, -1]])], 4),
    "index_select": (lambda x: x.index_select(1, torch.tensor([T - 1])), 0),
    "arange": (lambda x: x[:, torch.arange(T - 2, T)], 2),
    "gather": (lambda x: x.gather(1, torch.full((3, 1, WIDTH), T - 1)), 0),
    "gather of expanded": (
        lambda x: x.gather(1, torch.tensor([[4], [2], [9]])[..., None].expand(3, 1, WIDTH)),
        1,
    ),
    "take_along_dim": (lambda x: x.take_along_dim(torch.tensor([[[-1]]]), 1), 0),
    "take_along_dim of each": (
        lambda x: x.take_along_dim(torch.tensor([[1, 3], [-1, 2], [0, 9]])[..., None], 1),
        2,
    ),
    "rows and tokens": (lambda x: x[torch.arange(3), torch.tensor([4, -1, 7])], 1),
    "rows and the last": (lambda x: x[torch.arange(3), -1], 0),
    "rows and tokens, wide": (
        lambda x: x[torch.arange(3)[:, None], torch.tensor([[4, 1], [-1, 2], [7, 7]])],
        2,
    ),
    "an index and a slice": (lambda x: (x[:, [2]], x[:, -2:]), 2),
    "the first of a flip": (lambda x: x.flip(1)[:, 0], 0),
    "the second of a flip": (lambda x: x.flip(1)[:, 1], 1),
    "the last of a flip": (lambda x: x.flip(1)[:, -1], T - 2),
    "the first two of a flip": (lambda x: x.flip(1)[:, :2], 1),
    "sequence first": (lambda x: x.transpose(0, 1)[-1], 0),
    "sequence first, a slice": (lambda x: x.permute(1, 2, 0)[-2:], 1),
    "sequence first, unbound": (lambda x: x.movedim(1, 0).unbind(0)[-1], 0),
    "sequence first, flipped": (lambda x: x.transpose(0, 1).flip(0)[:1], 0),
    "sequence first, by an index": (lambda x: x.transpose(0, 1)[[-1, 4]], 2),
    "sequence first, by a wide index": (
        lambda x: x.transpose(0, 1)[torch.tensor([[3, 5], [-1, 2]])],
        4,
    ),
    "sequence first, of each": (
        lambda x: x.transpose(0, 1)[torch.tensor([4, -1, 7]), torch.arange(3)],
        1,
    ),
}
"""How tokens are asked for, and how many rows more than the fresh ones that may take."""


def tensors(result):
    return result if isinstance(result, tuple) else (result,)


def in_float64(args):
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, args
    )


@pytest.mark.parametrize("name", EXITS)
def test_last_tokens_however_they_are_asked_for(name):
    then, others = EXITS[name]
    model, args = Plain(then=then), inputs(batch=3)
    got, record = compiled(model, *args, recompute_ratio=1, strict=True, verify=True)
    with torch.no_grad():
        usual, exact = model(*args), copy.deepcopy(model).double()(*in_float64(args))
    for actual, eager, wanted in zip(*map(tensors, (got, usual, exact)), strict=True):
        assert_close_to_reference(actual, eager, wanted)
    assert record.layers == ("computed", "checked", "reused")
    _, reuse = compiled(model, *args, recompute_ratio=0, strict=True, verify=True)
    assert reuse.stages[0].now == 2 + others


class Last(Plain):
    """Picks tokens by an index that it is given, or computes of its inputs."""

    def forward(self, x, cached, fresh, picked, at_rows=False):
        found = super().forward(x, cached, fresh)
        return found[torch.arange(len(x)), picked] if at_rows else found[:, picked]


def oracle(model, x, cached, fresh, picked, rows):
    """Eager, for all tokens, cached keys and values below layer 1 where a token is not chosen."""
    chosen = None
    for number, qkv in enumerate(model.qkv):
        heads = qkv(x).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        if number == 1:
            scores = ((v - cached[1][1]) ** 2).sum((1, 3))
            forced = scores.scatter(1, fresh, torch.inf).scatter(1, picked % T, torch.inf)
            chosen = torch.zeros_like(forced).bool().scatter(1, forced.topk(rows).indices, True)
        if number > 1:
            k, v = (
                torch.where(chosen[:, None, :, None], new, old)
                for new, old in zip((k, v), cached[number], strict=True)
            )
        x = x + sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return x.gather(1, (picked % T)[..., None].expand(-1, -1, WIDTH))


@pytest.mark.parametrize(("batch", "at_rows"), [(1, False), (3, False), (3, True), (1, True)])
def test_tokens_that_the_data_name(batch, at_rows):
    """One artefact for all indices; what is asked for is computed, the others by their scores."""
    model, args = Last(then=lambda x: x), inputs(batch=batch)
    fn = torch.compile(model, backend=eager_cascade(recompute_ratio="0.3", decide="always"))
    torch._dynamo.reset()
    records = []
    for start in ([0, 5, -1], [9, -14, 3]):
        picked = torch.tensor(start[:batch] if at_rows else start[:2])
        with torch.no_grad():
            got = fn(*args, picked, at_rows)
            records.append(last_compilation())
            all_picked = picked[:, None] if at_rows else picked.expand(batch, 2)
            rows = records[0].blend.stages[0].now
            usual = oracle(model, *args, all_picked, rows)
            exact = oracle(copy.deepcopy(model).double(), *in_float64(args), all_picked, rows)
        found = got[:, None] if at_rows else got
        assert_close_to_reference(found, usual, exact)
    assert rows == 2 + 4 and records[0] is records[1]


class Gathered(Plain):
    """Picks one token by a lookup that takes no negative index."""

    def forward(self, x, cached, fresh, picked):
        found = super().forward(x, cached, fresh)
        return found.gather(1, picked[:, None, None].expand(-1, 1, WIDTH))


@pytest.mark.parametrize("place", [-1, T])
def test_a_lookup_beyond_the_tokens_stays_an_error(place):
    model, args = Gathered(then=lambda x: x), inputs(batch=3)
    _, record = compiled(model, *args, torch.tensor([T - 1, 2, 0]), strict=True)
    assert record.layers == ("computed", "checked", "reused")
    picked = torch.tensor([0, place, 2])
    with torch.no_grad(), pytest.raises(RuntimeError, match="out of bounds"):
        model(*args, picked)
    with pytest.raises(RuntimeError, match="out of bounds"):
        compiled(model, *args, picked, strict=True)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_gather_sequence_first(batch):
    """Of one row it is the lookup that it is batch first; of several it is not looked into."""

    def then(x):
        return x.transpose(0, 1).gather(0, torch.full((2, batch, WIDTH), T - 3))

    model, args = Plain(then=then), inputs(batch=batch)
    if batch > 1:
        with pytest.raises(Exception, match="all of them"):
            compiled(model, *args)
        return
    got, record = compiled(model, *args, recompute_ratio=1, strict=True)
    with torch.no_grad():
        usual, exact = model(*args), copy.deepcopy(model).double()(*in_float64(args))
    assert record.layers == ("computed", "checked", "reused")
    assert_close_to_reference(got, usual, exact)


def test_an_index_that_depends_on_what_is_reused_is_an_error():
    def then(x):
        return x[:, x.argmax(1)[0, :1]]

    with pytest.raises(Exception, match="all of them"):
        compiled(Plain(then=then), *inputs())


def shifted(x, layer):
    """Below the check layer tokens are mixed outside of attention."""
    return x if layer < 1 else x + x.roll(1, 1)


def test_an_op_that_mixes_tokens_declines_all_layers():
    x, cached, fresh = inputs()
    assert_declined(Plain(), (x, cached, fresh, None, shifted), Reason.TOKENS_MIXED)


def test_the_same_above_the_check_layer_is_no_matter():
    x, cached, fresh = inputs()

    def above(x, layer):
        return shifted(x, 1 - layer)

    _, record = compiled(Plain(), x, cached, fresh, None, above, strict=True)
    assert record.declined is None


@pytest.mark.parametrize("stages", ["3", "1:0.5,7:0.1"])
def test_a_layer_that_is_not_there(stages):
    wrong = stages[0] if ":" not in stages else "7"
    detail = f"check layer {wrong}, but the graph has layers 0 to 2"
    assert_declined(Plain(), inputs(), Reason.CHECK_LAYER, detail, check_layers=stages)


def test_layers_that_disagree():
    x, cached, fresh = inputs()

    module = Plain(layers=2)

    def two(x, cached, fresh):
        first = x
        for number, qkv in enumerate(module.qkv):
            heads = qkv(first).view(1, T, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
            q, k, v = heads.unbind(0)
            k, v = reuse_kv(k, v, *cached[number], fresh + number)
            first = first + sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return first[:, -1:]

    got, record = compiled(two, x, cached, fresh)
    assert record.declined.reason is Reason.REUSE_MISMATCH
    with torch.no_grad():
        torch.testing.assert_close(got, two(x, cached, fresh))


class TestFewTokens:
    def test_static(self):
        assert_declined(Plain(), inputs(), Reason.MIN_TOKENS, "12 cached tokens", decide="auto")
        options = {"decide": "auto", "min_tokens": 12, "strict": True}
        assert compiled(Plain(), *inputs(), **options)[1].declined is None

    def test_a_length_on_each_side_of_the_guard(self):
        model = Plain()
        backend = eager_cascade(min_tokens=20)
        fn = torch.compile(model, backend=backend, dynamic=True)
        seen = []
        with torch.no_grad():
            for tokens in (15, 30, 17, 40):
                before = last_compilation() if seen else None
                fn(*inputs(tokens=tokens))
                seen.append(
                    (last_compilation().blend.declined is None, last_compilation() is before)
                )
        assert [blends for blends, _ in seen[:2]] == [False, True]
        assert [same for _, same in seen] == [False, False, True, True]

    def test_all_tokens_of_a_short_prompt_are_no_error(self):
        got, record = compiled(Plain(then=lambda x: x * 2), *inputs(), decide="auto")
        assert record.declined.reason is Reason.MIN_TOKENS and got.shape[1] == T


def test_never_reports_only():
    _, record = compiled(Plain(), *inputs(), decide="never")
    assert record.declined.reason is Reason.NEVER
    assert record.stages[0].now == 2 + 2 and set(record.layers) == {"computed"}


class TestFailures:
    def test_a_bug_leaves_the_graph_as_it_was(self, monkeypatch):
        args = inputs()
        with torch.no_grad():
            gm = joint_graph(Plain(), *args, prepare=capture)
        before = str(gm.graph), [n.meta.get("val") for n in gm.graph.nodes]
        sizes = Sizes.of(gm.graph)
        record = Compilation()
        context = PassContext(sizes, Options(decide="always", strict=False), record)

        def broken(*args):
            raise RuntimeError("a bug")

        monkeypatch.setattr(blend_emit, "_check", broken)
        BlendPass().apply(gm.graph, context)
        assert record.blend.declined.reason is Reason.PASS_FAILED
        assert "a bug" in record.blend.declined.detail
        after = str(gm.graph), [n.meta.get("val") for n in gm.graph.nodes]
        assert after[0] == before[0]
        assert all(a is b for a, b in zip(after[1], before[1], strict=True))

    def test_strict_raises_it(self, monkeypatch):
        monkeypatch.setattr(blend, "emit_blend", lambda *a: 1 / 0)
        with pytest.raises(Exception, match="ZeroDivisionError"):
            compiled(Plain(), *inputs(), strict=True)
