"""What several launches read is written to memory once: what is, how much, and what is not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support import three_levels
from support.backend import eager_cascade
from support.hf_models import VOCABULARY, tiny_model
from support.lowering import USERS, fused_on_the_cpu, lowered_for_cuda, rewritten
from torch import fx

from torch_cascade.compiler.graph import tensor
from torch_cascade.kernels.ops import attend
from torch_cascade.passes.cleanup import CleanupPass
from torch_cascade.passes.lower import LowerPass
from torch_cascade.passes.written_once import REALIZE
from torch_cascade.runtime.prefix_cache import SharedPrefixCache

B, T, H, P, S, M, D = 2, 3, 5, 11, 7, 4, 16
N, LAYERS = B * T, 6
WRAPPER = torch.ops.higher_order.triton_kernel_wrapper_functional


def inputs() -> list[torch.Tensor]:
    """q, and K = V of prefix and suffix."""
    return [torch.randn(N, H, M, D), torch.randn(B, H, P, D), torch.randn(N, H, S, D)]


def computed(q, *_):
    """[M, P + S]: no condition on positions that the analysis reads."""
    keys = torch.arange(P + S, device=q.device)
    return (keys * 3 + keys[:M, None]) % 5 > 0


def layers(q, prefix, suffix, mask, count=LAYERS):
    kv = torch.cat([prefix.repeat_interleave(T, 0), suffix], 2)
    for _ in range(count):
        q = F.scaled_dot_product_attention(q.sin(), kv, kv, mask)
    return q


def for_cuda(fn, *args, dynamic=False, **kwargs) -> fx.Graph:
    pytest.importorskip("triton")
    return lowered_for_cuda(*rewritten(fn, *args, dynamic=dynamic, **kwargs))


def read(graph: fx.Graph, name: str) -> list[fx.Node]:
    """What the launches of a graph are given by a name, each node once."""
    kernels = graph.find_nodes(op="call_function", target=WRAPPER)
    given = [kernel.kwargs["kwargs"].get(name) for kernel in kernels]
    return list(dict.fromkeys(node for node in given if isinstance(node, fx.Node)))


def marked(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if REALIZE in node.meta]


def copies(graph: fx.Graph) -> list[fx.Node]:
    """Copies of masks."""
    clones = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    return [node for node in clones if tensor(node).dtype == torch.bool]


# --- what is --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_of_all_layers_is_two_copies(dynamic):
    """One of the prefix's keys and one of the suffix's; each is read where it is written."""
    fn = lambda *args: layers(*args, computed(*args))  # noqa: E731
    graph = for_cuda(fn, *inputs(), dynamic=dynamic)
    found = copies(graph)
    assert [tuple(map(int, tensor(node).shape)) for node in found] == [(M, P), (M, S)]
    assert all(tensor(node).is_contiguous() for node in found)
    assert set(found) == {*read(graph, "mask_a"), *read(graph, "mask_b")} <= set(marked(graph))


def test_a_mask_that_is_expanded_is_copied_before():
    """Kernels read repeated elements by a stride of 0."""

    def fn(q, prefix, _suffix):
        mask = computed(q).expand(N, H, M, P + S)[..., :P]
        first = attend(q, prefix, prefix, mask, branches=T)[0]
        return attend(first, prefix, prefix, mask, branches=T)[0]

    graph = for_cuda(fn, *inputs())
    (copy,), (mask,) = copies(graph), read(graph, "mask_a")
    assert marked(graph) == [copy] and tensor(copy).numel() == M * P
    assert tensor(mask).shape == (N, H, M, P) and tensor(mask).stride()[:2] == (0, 0)


def test_a_mask_that_is_joined():
    """What Inductor joins element by element is in memory no more than a comparison is."""

    def fn(q, prefix, suffix, written):
        seen = torch.arange(S, device=q.device) <= written[:, None]
        mask = torch.cat([torch.ones(N, P, dtype=torch.bool, device=q.device), seen], 1)
        return layers(q, prefix, suffix, mask[:, None, None])

    graph = for_cuda(fn, *inputs(), torch.arange(N))
    # The numbers of seen keys, where they are proved to be that, are read as one tensor, too.
    (shared,) = [*read(graph, "mask_b"), *read(graph, "kv_lens_b")]
    assert marked(graph) == [shared] and tensor(shared).numel() <= N * S


def test_queries_that_two_launches_read():
    """Three levels are two launches, and both read the rotated queries."""
    fn = lambda q, *kv: three_levels.attention(q.sin() + 1, *kv)  # noqa: E731
    graph = for_cuda(fn, *three_levels.inputs())
    (queries,) = read(graph, "q")
    assert len(graph.find_nodes(op="call_function", target=WRAPPER)) == 3
    assert marked(graph) == [queries]


def test_a_model_with_a_shared_cache():
    model = tiny_model("Llama", torch.bfloat16, num_hidden_layers=3)
    ids = torch.randint(3, VOCABULARY, (1, P))
    cache = SharedPrefixCache.prefill(model, ids, branches=T, max_suffix=9)
    step = torch.randint(3, VOCABULARY, (T, 1))
    graph = for_cuda(model, step, past_key_values=cache)
    # How far the suffix is written: a mask of its slots, or where that is proved a number of keys.
    (shared,) = [*read(graph, "mask_b"), *read(graph, "kv_lens_b")]
    assert marked(graph) == [shared] and tensor(shared).numel() <= 9


# --- what is not ----------------------------------------------------------------------------------


def test_a_mask_that_is_given():
    """A part of it is a view of memory that is there."""
    mask = torch.rand(M, P + S) > 0.5
    graph = for_cuda(layers, *inputs(), mask)
    assert read(graph, "mask_b") and not copies(graph) and not marked(graph)


def test_a_mask_that_is_a_matrix_product():
    """It is in memory, where a part of it can be read."""

    def fn(q, prefix, _suffix):
        mask = (q[0, 0] @ torch.ones(D, P + S, device=q.device))[..., :P]
        first = attend(q, prefix, prefix, mask, branches=T)[0]
        return attend(first, prefix, prefix, mask, branches=T)[0]

    graph = for_cuda(fn, *inputs())
    (mask,) = read(graph, "mask_a")
    assert mask.target == torch.ops.aten.slice.Tensor and not marked(graph)


def test_one_layer():
    """What is read once is written once anyway."""
    fn = lambda *args: layers(*args, computed(*args), count=1)  # noqa: E731
    assert not marked(for_cuda(fn, *inputs()))


def test_kernels_of_the_users_own():
    fn = lambda *args: layers(*args, computed(*args))  # noqa: E731
    graph = for_cuda(fn, *inputs())
    for node in graph.nodes:
        node.meta.pop(REALIZE, None)
    CleanupPass(since=frozenset(graph.nodes)).apply(graph, None)
    assert not marked(graph)


def test_nothing_on_a_cpu():
    fn = lambda *args: layers(*args, computed(*args))  # noqa: E731
    gm, context = rewritten(fn, *inputs())
    for each in (LowerPass(), CleanupPass(since=gm.meta[USERS])):
        each.apply(gm.graph, context)
    assert not marked(gm.graph) and not copies(gm.graph)
    assert not [n for n in gm.graph.nodes if "cascade" in str(n.target)]


# --- the values -----------------------------------------------------------------------------------


def test_the_same_bits():
    fn = lambda *args: layers(*args, computed(*args))  # noqa: E731
    given = inputs()

    def run():
        torch._dynamo.reset()
        backend = eager_cascade(decide="always", verify=True)
        with torch.no_grad():
            return torch.compile(fn, backend=backend)(*given)

    expected = run()
    with fused_on_the_cpu() as stand_in:
        actual = run()
    assert stand_in.calls and torch.equal(actual, expected)
