"""Public faults of other graph passes and backends, and the traps of this level: one test each.

Named after the report (of pytorch/pytorch unless it says so). What concerns only the capture of
calls is tested in `tests/compiler/test_capture.py`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.backend import eager_cascade
from support.programs import plain
from support.promises import (
    attend_shared,
    check,
    check_call,
    compiled,
    declined,
    shared_inputs,
    tally,
)
from torch import Tensor, fx


def joined(kp: Tensor, ks: Tensor, t: int) -> Tensor:
    return torch.cat([kp.repeat_interleave(t, 0), ks], 2)


def by_hand(q: Tensor, k: Tensor, v: Tensor, scale: Any = 0.25) -> Tensor:
    return (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v


# Matching.


def test_111190_symbolic_sizes_in_the_expand():
    def fn(q, kp, ks, vp, vs):
        wide = [x.expand(q.shape[0], -1, -1, -1) for x in (kp, vp)]
        k, v = torch.cat([wide[0], ks], 2), torch.cat([wide[1], vs], 2)
        return F.scaled_dot_product_attention(q, k, v)

    check(fn, *shared_inputs(1, 5), dynamic=True)


def test_195412_four_spellings_of_the_scale_have_one_result():
    inputs, d = shared_inputs(), 16
    spellings = [
        lambda q, k, v: ((q @ k.mT) / math.sqrt(d)).softmax(-1) @ v,
        lambda q, k, v: ((q @ k.mT) * d**-0.5).softmax(-1) @ v,
        lambda q, k, v: ((q * d**-0.5) @ k.mT).softmax(-1) @ v,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=d**-0.5),
    ]
    for spelling in spellings:

        def fn(q, kp, ks, vp, vs, spelling=spelling):
            return spelling(q, joined(kp, ks, 3), joined(vp, vs, 3))

        check(fn, *inputs)


def test_185574_kernel_choice_around_and_transposed_operands():
    q, kp, ks, vp, vs = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in shared_inputs())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        check(attend_shared, q, kp, ks, vp, vs)


def test_191203_a_scale_that_is_a_tensor():
    def fn(q, kp, ks, vp, vs, scale):
        return by_hand(q, joined(kp, ks, 3), joined(vp, vs, 3), scale)

    check(fn, *shared_inputs(), torch.tensor(0.25), rewritten=None)


@pytest.mark.parametrize("change", [2, 4])
def test_172183_a_dtype_that_eager_refuses_is_refused(change):
    inputs = shared_inputs()
    inputs[change] = inputs[change].half()
    inputs[change - 1] = inputs[change - 1].half()
    with pytest.raises(RuntimeError):
        attend_shared(*inputs)
    with pytest.raises(Exception, match="dtype"):
        compiled(attend_shared)(*inputs)


def guards_under(backend: Any, fn: Any, inputs: list[Tensor]) -> list[str]:
    """The guards on sizes that a compile leaves behind."""
    found: list[str] = []

    def recording(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        nodes = [n for n in gm.graph.nodes if isinstance(n.meta.get("example_value"), Tensor)]
        shape_env = nodes[0].meta["example_value"].fake_mode.shape_env
        result = backend(gm, example_inputs)
        found.extend(sorted({str(guard.expr) for guard in shape_env.guards}))
        return result

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=recording, dynamic=True)(*inputs)
    return found


def unshared(q, kp, ks, vp, vs):
    return F.scaled_dot_product_attention(q, torch.cat([kp, ks], 2), torch.cat([vp, vs], 2))


def test_118771_analysis_adds_no_guard():
    inputs = shared_inputs(5, 1)
    ours = guards_under(eager_cascade(decide="always"), unshared, inputs)
    assert ours == guards_under(plain, unshared, inputs)


def test_118771_a_rewrite_adds_no_equality():
    """An equality as a guard is one compile a size; what the kernel needs may be an inequality."""
    inputs = shared_inputs()
    theirs = guards_under(plain, attend_shared, inputs)
    ours = guards_under(eager_cascade(decide="always"), attend_shared, inputs)
    new = [guard for guard in ours if guard not in theirs]
    assert not [guard for guard in new if guard.startswith("Eq(")], new


def test_vllm_33945_a_write_to_the_prefix_is_kept():
    """The prefix is written in the graph, read by attention, and must be written afterwards."""

    def fn(q, kp, ks, vp, vs, new, at):
        kp.index_copy_(2, at, new)
        out = attend_shared(q, kp, ks, vp, vs)
        vp.index_copy_(2, at, new)
        return out

    check(fn, *shared_inputs(), torch.randn(2, 2, 1, 16), torch.tensor([3]))


# Sizes and guards.


def test_vllm_26394_marked_dynamic_sizes_stay_dynamic():
    inputs = shared_inputs(prefix=6, suffix=5)  # as long as the batch is large
    run = compiled(attend_shared, dynamic=None)
    torch._dynamo.mark_dynamic(inputs[0], 2)
    for x in inputs[1::2]:
        torch._dynamo.mark_dynamic(x, 2)
    with torch.no_grad():
        run(*inputs)
    check_call(run, attend_shared, *shared_inputs(prefix=9, suffix=5, queries=7))
    assert tally()["rewritten"] >= 1


def test_97820_training_is_left_to_inductor_at_any_batch():
    run = compiled(attend_shared, dynamic=True)
    for requests in (2, 3):
        inputs = [x.requires_grad_() for x in shared_inputs(requests)]
        expected = torch.autograd.grad(attend_shared(*inputs).square().sum(), inputs)
        actual = torch.autograd.grad(run(*inputs).square().sum(), inputs)
        torch.testing.assert_close(actual, expected)
    assert declined() == {"requires-grad"}


@pytest.mark.parametrize(
    ("dynamic", "sizes"),
    [(None, ((1, 7, 4), (2, 1, 4), (2, 0, 4), (2, 7, 0))), (True, ((2, 0, 4), (2, 7, 0)))],
)
def test_106067_sizes_of_zero_and_one(dynamic, sizes):
    run = compiled(attend_shared, dynamic)
    for requests, prefix, suffix in sizes:
        check_call(run, attend_shared, *shared_inputs(requests, 3, prefix=prefix, suffix=suffix))
    assert "pass-failed" not in declined()


def test_duck_shaping_batch_as_long_as_the_suffix():
    run = compiled(attend_shared, dynamic=True)
    check_call(run, attend_shared, *shared_inputs(2, 3, suffix=6, prefix=6, queries=6))
    check_call(run, attend_shared, *shared_inputs(3, 3, suffix=4, prefix=5, queries=2))


def test_k_and_v_are_one_tensor():
    def fn(q, kp, ks):
        return attend_shared(q, kp, ks, kp, ks)

    check(fn, *shared_inputs()[:3])


def test_a_materialised_prefix_after_a_stride_of_zero_is_compiled_anew():
    def fn(q, k, v, ks, vs):
        k, v = torch.cat([k, ks], 2), torch.cat([v, vs], 2)
        return F.scaled_dot_product_attention(q, k, v)

    q, kp, ks, vp, vs = shared_inputs(1, 5)
    run = compiled(fn, dynamic=True)
    check_call(run, fn, q, kp.expand(5, -1, -1, -1), vp.expand(5, -1, -1, -1), ks, vs)
    assert tally()["rewritten"] == 1
    different = torch.randn(2, 5, 2, 7, 16)
    check_call(run, fn, q, different[0], different[1], ks, vs)
    assert tally()["rewritten"] == 1


# Layout, aliases, writes.


def test_writes_between_definition_and_use():
    def fn(q, kp, ks, vp, vs):
        k, v = joined(kp, ks, 3), joined(vp, vs, 3)
        k.mul_(2)
        v[:, :, 0] = 0
        return F.scaled_dot_product_attention(q, k, v)

    check(fn, *shared_inputs(), rewritten=None)


def test_133512_a_write_to_strided_queries():
    def fn(q, kp, ks, vp, vs):
        q.add_(1)
        return attend_shared(q, kp, ks, vp, vs).transpose(1, 2).flatten(2)

    q, *kv = shared_inputs()
    check(fn, q.transpose(1, 2).contiguous().transpose(1, 2), *kv)


def test_184088_an_expanded_prefix_is_returned_too():
    def fn(q, kp, ks, vp, vs):
        wide = kp.expand(5, -1, -1, -1)
        k, v = torch.cat([wide, ks], 2), torch.cat([vp.expand(5, -1, -1, -1), vs], 2)
        return F.scaled_dot_product_attention(q, k, v), wide, k

    check(fn, *shared_inputs(1, 5))


def test_152425_a_write_to_an_expanded_tensor_is_what_it_is_under_inductor():
    """Eager code refuses it; Inductor lets it pass. This package adds nothing to that."""

    def fn(q, kp, ks, vp, vs):
        kp.expand(5, -1, -1, -1).mul_(2)
        return attend_shared(q, kp, ks, vp, vs)

    inputs = shared_inputs(1, 5)
    with torch.no_grad():
        actual = compiled(fn, decide="never")(*(x.clone() for x in inputs))
        torch._dynamo.reset()
        expected = torch.compile(fn, backend=plain, dynamic=False)(*(x.clone() for x in inputs))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("odd", [13, 21])
def test_137979_operands_out_of_a_matrix_product(odd):
    def fn(x, w, kp, ks, vp, vs):
        q = (x @ w).unflatten(-1, (2, odd)).transpose(1, 2)
        return attend_shared(q, kp, ks, vp, vs).transpose(1, 2).reshape(6, 3, 2 * odd)

    _, *kv = shared_inputs(d=odd)
    check(fn, torch.randn(6, 3, 7), torch.randn(7, 2 * odd), *kv)


def test_143579_layouts_through_generated_code():
    """Inductor asserts the strides it was promised when the code runs."""

    def fn(q, kp, ks, vp, vs):
        out = attend_shared(q, kp, ks[:, :, 1:], vp, vs[:, :, 1:])
        return out.transpose(1, 2).flatten(2), out

    q, *kv = shared_inputs(suffix=6)
    q = torch.cat([q, q])[3:9].transpose(1, 2).contiguous().transpose(1, 2)
    torch._dynamo.reset()
    run = torch.compile(fn, backend="cascade", dynamic=False, options={"decide": "always"})
    check_call(run, fn, q, *kv)


def test_138980_the_report_does_not_change_after_the_fact():
    from torch_cascade.compiler.backend import recent

    run, inputs = compiled(attend_shared), shared_inputs()
    with torch.no_grad():
        run(*inputs)
        text = recent()[-1].after
        run(*inputs)
    assert recent()[-1].after == text
    assert "cascade.merge" in text


# Autocast, precision.


def test_autocast_gives_the_dtype_of_the_call():
    def fn(q, kp, ks, vp, vs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attend_shared(q, kp, ks, vp, vs)

    check(fn, *shared_inputs(), rewritten=None, exact=attend_shared)


def test_108108_causal_in_a_cache():
    """Three queries at the end of fifteen keys: the mask's diagonal is at the bottom right."""

    def fn(q, kp, ks, vp, vs):
        m, keys = q.shape[2], kp.shape[2] + ks.shape[2]
        mask = torch.ones(m, keys, dtype=torch.bool).tril(keys - m)
        return attend_shared(q, kp, ks, vp, vs, mask)

    check(fn, *shared_inputs(queries=3, prefix=12, suffix=3))


def test_136232_training_with_a_mask_longer_than_the_sequence():
    def fn(q, kp, ks, vp, vs, mask):
        return attend_shared(q, kp, ks, vp, vs, mask[:, : kp.shape[2] + ks.shape[2]])

    inputs = [x.requires_grad_() for x in shared_inputs()]
    mask = torch.rand(5, 40) < 0.7
    run = compiled(fn)
    gradients = torch.autograd.grad(run(*inputs, mask).sum(), inputs)
    expected = torch.autograd.grad(fn(*inputs, mask).sum(), inputs)
    torch.testing.assert_close(gradients, expected)
    assert not any(g.isnan().any() for g in gradients)


def test_131360_the_backend_is_listed_by_its_name():
    assert "cascade" in torch._dynamo.list_backends(exclude_tags=())


def test_a_switch_flipped_after_compiling_does_nothing(monkeypatch):
    run, inputs = compiled(attend_shared), shared_inputs()
    with torch.no_grad():
        first = run(*inputs)
        monkeypatch.setenv("TORCH_CASCADE_DISABLE", "1")
        assert torch.equal(run(*inputs), first)
    assert tally() == {"sites": 1, "rewritten": 1}
