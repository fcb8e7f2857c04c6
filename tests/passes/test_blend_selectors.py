"""Selectors: what they are told, what they choose, and what goes wrong."""

import math
from dataclasses import replace

import pytest
import torch
from support.backend import last_compilation
from support.blend_choice import assert_chooses
from support.blend_models import blended, model_of, prompt_of
from support.blend_plain import Plain, compiled, inputs

from torch_cascade.compiler.option_values import SELECTORS
from torch_cascade.compiler.options import Options
from torch_cascade.compiler.pipeline import Pipeline
from torch_cascade.compiler.record import Compilation
from torch_cascade.compiler.report import Reason
from torch_cascade.runtime.row_choice import Layer, choose_rows, chunk_offsets
from torch_cascade.runtime.selection import BUILT_IN, Facts

READS = r".*\n?.*expected plain torch code on the tensors of its facts, which neither reads"
OUTSIDE = torch.ones(14)

ROWS = [[7, 9, 5], [5, 4, 7, 5]]


def layer(length=13, batch=2, seed=5, dtype=torch.float32, **changes):
    """Random keys and values at a check layer; two chunks, then two fresh tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch, 3, length, 4
    tensors = [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(4)]
    fresh = torch.tensor([[length - 1, length - 2]]).repeat(batch, 1)
    chunks = torch.tensor([[0] * 5 + [1] * (length - 7) + [-1] * 2]).repeat(batch, 1)
    return Layer(*tensors, **{"fresh_rows": fresh, "chunks": chunks} | changes)


def unknown():
    raise AssertionError("nobody asked")


def chosen(known, count, selector, exits=1):
    index, places = choose_rows(known, count, exits, BUILT_IN.get(selector, selector), unknown)
    assert torch.equal(index, index.sort(1).values)
    whole = known.positions() if known.kept is None else known.kept
    assert torch.equal(whole.gather(1, places), index)
    return index.tolist()


def test_names_are_those_of_the_option():
    assert tuple(BUILT_IN) == SELECTORS


@pytest.mark.parametrize("name", ["v", "k", "kv"])
def test_deviations(name):
    """Squared distances over heads and features, in float64; the largest first."""
    known = layer()
    k = ((known.k.double() - known.k_cached.double()) ** 2).sum((1, 3))
    v = ((known.v.double() - known.v_cached.double()) ** 2).sum((1, 3))
    scores = {"v": v, "k": k, "kv": k + v}[name]
    for n, rows in enumerate(chosen(known, 5, name)):
        best = sorted(range(11), key=lambda j: -scores[n, j])[:3]
        assert rows == sorted([*best, 11, 12])


def test_rotation_changes_no_choice_by_keys():
    """A rotation of pairs keeps distances, so deviations before and after RoPE choose alike."""
    known = layer(dtype=torch.float64)
    angle = torch.arange(13, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1])
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotated(x):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, 2))) * turn).flatten(3)

    turned = Layer(
        rotated(known.k),
        known.v,
        rotated(known.k_cached),
        known.v_cached,
        known.fresh_rows,
        known.chunks,
    )
    assert not torch.equal(turned.k, known.k)
    assert chosen(turned, 6, "k") == chosen(known, 6, "k")


def test_chunk_heads():
    assert chosen(layer(), 6, "heads") == [[0, 1, 5, 6, 11, 12]] * 2
    repeated = torch.tensor([[3, 3, 3, 3, 7, 7, 7, 3, 3, 3, 3, -1, -1]] * 2)
    assert chosen(layer(chunks=repeated), 5, "heads") == [[0, 4, 7, 11, 12]] * 2
    assert chunk_offsets(repeated)[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_chunk_heads_are_those_whose_reuse_is_wrong(kind):
    """The first chunk of a prompt is exact up to rounding, and so is one behind its own context."""
    chunks = torch.tensor([[0] * 4 + [-1] * 2 + [1] * 3 + [2] * 4] * 2)
    known = layer(chunks=chunks, fresh_rows=torch.tensor([[4, 5, 12]] * 2))
    for n, exact in ((0, chunks[0] == 0), (1, chunks[1] != 1)):
        known.v_cached[n][:, exact] = known.v[n][:, exact].to(kind).float()
    assert chosen(known, 7, "heads") == [[4, 5, 6, 7, 9, 10, 12], [0, 4, 5, 6, 7, 8, 12]]


def test_chunk_heads_where_an_earlier_check_kept_few():
    known = layer(batch=1)
    known.v_cached[:, :, :5] = known.v[:, :, :5]
    kept = torch.tensor([[1, 2, 3, 6, 7, 11, 12]])
    few = replace(known, k=known.k[:, :, kept[0]], v=known.v[:, :, kept[0]], kept=kept)
    assert chosen(few, 4, "heads") == [[6, 7, 11, 12]]


def test_random_is_the_same_every_time_and_uniform():
    known = layer(length=2001, batch=1, chunks=None)
    rows = chosen(known, 402, "random")
    assert rows == chosen(layer(length=2001, batch=1, chunks=None, seed=9), 402, "random")
    counts = torch.histogram(torch.tensor(rows[0][:400]).double(), 5, range=(0, 2000)).hist
    assert (counts - 80).abs().max() < 4 * math.sqrt(80 * 0.8)
    other = chosen(layer(length=2001, batch=1, chunks=torch.ones(1, 2001).long()), 402, "random")
    assert other != rows


def test_what_is_forced_and_what_is_last():
    """Fresh tokens and exits come before infinite scores, NaN counts as one; padding is last."""
    known = layer(batch=1)
    known.chunks[0, :3] = -1
    known.v_cached[0, 0, 4, 0] = torch.nan
    known.v_cached[0, 0, 7, 0] = torch.inf
    known.v_cached[0, 0, 1, 0] = torch.inf
    assert chosen(known, 4, "v") == [[4, 7, 11, 12]]
    assert chosen(known, 4, "v", exits=4) == [[9, 10, 11, 12]]
    assert set(range(3, 13)) <= set(chosen(known, 11, "v")[0])


def test_equal_scores_keep_the_order_of_tokens():
    known = layer()
    assert (
        chosen(known, 5, lambda facts: torch.zeros_like(facts.v_deviation))
        == [[0, 1, 2, 11, 12]] * 2
    )


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_deviations_of_short_dtypes_are_summed_in_float32(kind):
    known = layer(dtype=torch.float32)
    short = Layer(
        *(x.mul(300).to(kind) for x in (known.k, known.v, known.k_cached, known.v_cached)),
        known.fresh_rows,
        known.chunks,
    )
    facts = short.facts(unknown)
    assert facts.v_deviation.dtype == torch.float32 and torch.isfinite(facts.v_deviation).all()


class Recency:
    """A selector of a user."""

    name = "recency"

    def __init__(self, key=None):
        self.key = key

    def uuid(self):
        return self.key

    def __call__(self, facts: Facts):
        return facts.positions.float()


class TestOfUsers:
    def test_it_chooses(self):
        """At two layers: the second time it is told of the rows that were kept."""
        prompt = prompt_of(model_of("Llama"), ROWS)
        options = {"check_layers": "0:.4,1:.15", "selector": Recency()}

        def metric(n, k, *others):
            return torch.arange(21.0)

        rows = assert_chooses("Llama", prompt, metric, {0: "0.4", 1: "0.15"}, **options)
        assert rows == [list(range(13, 21))] * 2
        assert last_compilation().blend.selector == "recency"

    @pytest.mark.parametrize(
        ("selector", "message"),
        [
            (lambda facts: facts.nothing, "AttributeError"),
            (lambda facts: facts.positions, "expected floating scores, got torch.int64"),
            (lambda facts: 3, "expected floating scores, got int"),
            (lambda facts: facts.v_deviation[:, 1:], r"expected scores \[1, 14\], got \[1, 13\]"),
            (lambda facts: facts.v_deviation.to("meta"), "expected scores on cpu, got meta"),
            (lambda facts: facts.v_deviation * facts.v_deviation.max().item(), READS),
            (lambda facts: facts.v_deviation if facts.v_deviation.max() > 0 else None, READS),
            (lambda facts: torch.tensor(facts.v_deviation.tolist()), READS),
            (lambda facts: torch.from_numpy(facts.v_deviation.numpy()), READS),
            (lambda facts: facts.v_deviation[:, int(facts.positions.max())], READS),
            (lambda facts: facts.v_deviation[facts.positions > 2], READS),
            (lambda facts: facts.v_deviation + facts.positions.nonzero()[0, 0], READS),
            (lambda facts: facts.v_deviation * torch.tensor([1.0] * 14), READS),
            (lambda facts: facts.v_deviation * OUTSIDE, READS),
        ],
    )
    def test_its_faults_are_errors(self, selector, message):
        """Whatever breaks the tracing names the selector, and says what is expected of one."""
        with pytest.raises(Exception, match=f"SelectorError: selector <lambda>: {message}"):
            compiled(Plain(), *inputs(), selector=selector)

    @pytest.mark.parametrize("field", ["chunks", "positions"])
    @pytest.mark.parametrize("stages", ["1", "0:0.7,1:0.3"])
    def test_what_it_is_told_is_not_to_be_written(self, field, stages):
        def selector(facts):
            getattr(facts, field)[:, :1].clamp_(max=0)
            return facts.v_deviation

        x, cached, fresh = inputs()
        chunks = torch.zeros(1, x.shape[1], dtype=torch.int64)
        message = f"SelectorError: selector selector: .* got a write into {field}"
        with pytest.raises(Exception, match=message):
            compiled(Plain(), x, cached, fresh, chunks, selector=selector, check_layers=stages)

    def test_numbers_may_be_written_into_its_scores(self):
        def selector(facts):
            scores = facts.v_deviation.clone()
            scores[facts.positions < 12] = 0.0
            scores[:, 3] = torch.tensor(7.0)
            return scores

        _, record = compiled(Plain(), *inputs(), selector=selector, recompute_ratio=0.1)
        assert record.declined is None and record.stages[0].now == 2 + 2

    def test_it_is_in_the_key_of_caches_or_nothing_is_cached(self):
        def key(selector):
            return Pipeline(Options.resolve({"selector": selector})[0], Compilation()).uuid()

        assert key(Recency()) is None and key(lambda facts: facts.v_deviation) is None
        assert key("v") != key("k") and key("v") == key(" V ")
        assert key(Recency("a")) == key(Recency("a")) != key(Recency("b"))


def test_heads_without_chunks_are_declined():
    model = model_of("Llama", layers=2)
    prompt = prompt_of(model, ROWS)
    got = blended(model, replace(prompt, chunks=None), selector="heads", strict=False)
    assert got.record.declined.reason is Reason.SELECTOR
    assert "heads needs chunks" in got.record.declined.detail
