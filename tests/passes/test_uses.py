"""`verify=1` finds passes that change what others read, though each graph is what it says it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.shared_prefix import attention, inputs
from torch._dynamo.exc import BackendCompilerFailed

import torch_cascade
from torch_cascade import Pass, register_pass
from torch_cascade.compiler import pass_registry
from torch_cascade.passes.uses import Uses
from torch_cascade.passes.verify import GraphError

aten, prims = torch.ops.aten, torch.ops.prims


def replaced(op, target, *args, **kwargs):
    """A pass that puts `target(input of op, ...)` in the place of `op`, with its true metadata."""

    def edit(graph):
        for node in graph.find_nodes(op="call_function", target=op):
            with graph.inserting_before(node):
                new = graph.call_function(target, (node.args[0], *args), kwargs)
            new.meta["val"] = target(node.args[0].meta["val"], *args, **kwargs)
            node.replace_all_uses_with(new)
            graph.erase_node(node)

    return edit


def dropped(op):
    """A pass that puts the input of `op` in its place."""

    def edit(graph):
        for node in graph.find_nodes(op="call_function", target=op):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)

    return edit


def copied(graph):
    """Readers of a view read a copy of it."""
    for node in graph.find_nodes(op="call_function", target=aten.permute.default):
        with graph.inserting_after(node):
            new = graph.call_function(aten.clone.default, (node,))
        new.meta["val"] = node.meta["val"].clone()
        node.replace_all_uses_with(new, delete_user_cb=lambda user, kept=new: user is not kept)


def joined(graph):
    """Two equal results become one."""
    first, second = graph.output_node().args[0]
    second.replace_all_uses_with(first)


def fewer(graph):
    """The last result is forgotten."""
    output = graph.output_node()
    output.args = (output.args[0][:-1],)


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of x [3, 4], a broken pass, and what verify says of it."""

    fn: Callable[..., Any]
    edit: Callable[[Any], None]
    says: str


wide = torch.float64
CASES = {
    "a result becomes an input": Case(
        lambda x: (x.sin(), x.clone()),
        dropped(aten.clone.default),
        "the graph returns arg0_1 in place of clone: shares memory with arg0_1",
    ),
    "a view of an input becomes a copy": Case(
        lambda x: (x.sin(), x.t()),
        copied,
        "strides|no longer shares memory with arg0_1",
    ),
    "two results become one": Case(
        lambda x: (x.sin(), x.sin()),
        joined,
        "shares memory with result 1, and did not before",
    ),
    "a result less": Case(lambda x: (x.sin(), x.cos()), fewer, "the graph has 1 results, it had 2"),
    "a result of another dtype": Case(
        lambda x: (x.sin(), x.cos()),
        replaced(aten.cos.default, prims.convert_element_type.default, wide),
        r"the graph returns .* in place of cos: expected torch.float32.*got torch.float64",
    ),
    "a result of other strides": Case(
        lambda x: (x.cos(),),
        lambda graph: transposed(graph),
        r"expected torch.float32 \(3, 4\) strides \(4, 1\).*got .*strides \(1, 3\)",
    ),
    "a reader that does not care of strides": Case(
        lambda x: (x.cos().sum(),),
        lambda graph: transposed(graph),
        r"sum_1 reads .* in place of cos: expected .*strides \(4, 1\).*got .*strides \(1, 3\)",
    ),
    "a reader that does not care of sizes": Case(
        lambda x: (x.cos().sum(),),
        replaced(aten.cos.default, aten.slice.Tensor, 0, 0, 2),
        r"sum_1 reads .* in place of cos: expected torch.float32 \(3, 4\).*got .* \(2, 4\)",
    ),
    "a reader that does not care of the dtype": Case(
        lambda x: (x.cos() > 0,),
        replaced(aten.cos.default, prims.convert_element_type.default, wide),
        r"gt reads .* in place of cos: expected torch.float32 .*got torch.float64",
    ),
    "a result on another device": Case(
        lambda x: (x.sin(), x.cos()),
        replaced(aten.cos.default, prims.device_put.default, torch.device("meta")),
        "the graph returns .* in place of cos: expected .* on cpu, got .* on meta",
    ),
    "a reader of a copy reads an input": Case(
        lambda x: (x.clone().sum(),),
        dropped(aten.clone.default),
        "sum_1 reads arg0_1 in place of clone: shares memory with arg0_1, and did not before",
    ),
}


def transposed(graph):
    """Each cosine in the memory of its transpose."""
    for node in graph.find_nodes(op="call_function", target=aten.cos.default):
        value = node.meta["val"]
        with graph.inserting_after(node):
            turned = graph.call_function(aten.permute.default, (node, [1, 0]))
            turned.meta["val"] = value.permute(1, 0)
        with graph.inserting_after(turned):
            dense = graph.call_function(
                aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}
            )
            dense.meta["val"] = turned.meta["val"].clone(memory_format=torch.contiguous_format)
        with graph.inserting_after(dense):
            back = graph.call_function(aten.permute.default, (dense, [1, 0]))
            back.meta["val"] = dense.meta["val"].permute(1, 0)
        node.replace_all_uses_with(back, delete_user_cb=lambda user, kept=turned: user is not kept)


def run(case, monkeypatch, dynamic=False):
    @dataclasses.dataclass(frozen=True)
    class Broken(Pass):
        """Edits."""

        name: ClassVar[str] = "broken"

        def apply(self, graph, context):
            case.edit(graph)

    monkeypatch.setattr(pass_registry, "_registered", {})
    register_pass(Broken)
    torch._dynamo.reset()
    backend = eager_cascade(passes="cascade,broken", verify=True)
    torch.compile(case.fn, backend=backend, dynamic=dynamic)(torch.randn(3, 4))


@pytest.mark.parametrize("name", CASES)
def test_what_others_read_is_compared(name, monkeypatch):
    case = CASES[name]
    with pytest.raises(BackendCompilerFailed, match=f"after pass broken: .*{case.says}") as caught:
        run(case, monkeypatch)
    assert isinstance(caught.value.inner_exception, GraphError)


@pytest.mark.parametrize("name", CASES)
def test_nothing_else_would_have_found_it(name, monkeypatch):
    """The graphs agree with their metadata: `check_graph` alone has nothing to say."""
    monkeypatch.setattr(Uses, "check", lambda uses, *args, **keywords: uses)
    if name == "a result less":
        with pytest.raises(BackendCompilerFailed, match="AssertionError"):  # torch's own, of counts
            run(CASES[name], monkeypatch)
        return
    run(CASES[name], monkeypatch)


def test_an_op_that_inductor_has_taken_apart(monkeypatch):
    """Inductor's own error names neither the pass nor what would help."""
    case = Case(lambda x: x.cos(), replaced(aten.cos.default, aten.clamp.default, -1, 1), "")
    says = r"after pass broken: .*aten.clamp.default"
    with pytest.raises(BackendCompilerFailed, match=says) as e:
        run(case, monkeypatch)
    assert isinstance(e.value.inner_exception, GraphError)
    assert "expected the ops that it consists of" in str(e.value)


SPOILED = {
    "metadata": lambda node: node.meta.update(val=node.meta["val"].double()),
    "an argument": lambda node: node.update_arg(1, [0, 1]),
    "metadata of what is read": lambda node: node.args[0].meta.update(val=torch.ones(5, 3)),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_was_right_before_an_earlier_pass_is_looked_at_again(name, monkeypatch):
    """Calls that changed are run again: by their value, their arguments, or the values of these."""

    def edit(graph):
        (node,) = graph.find_nodes(op="call_function", target=aten.permute.default)
        with node.args[0].meta["val"].fake_mode:
            SPOILED[name](node)

    case = Case(lambda x: x.t().cos(), edit, "")
    with pytest.raises(BackendCompilerFailed, match="after pass broken: node %permute :") as caught:
        run(case, monkeypatch)
    assert isinstance(caught.value.inner_exception, GraphError)


def test_a_call_is_run_once_by_all_checks_of_a_kind(monkeypatch):
    ran = []

    def counted(x):
        ran.append(x)
        return aten.sin.default(x)

    def edit(graph):
        for node in graph.find_nodes(op="call_function", target=aten.sin.default):
            node.target = counted

    run(Case(lambda x: x.sin().cos(), edit, ""), monkeypatch)
    fakes = [x for x in ran if isinstance(x, torch._subclasses.FakeTensor)]
    assert len(fakes) == 2  # for its metadata, and for its memory; two more passes follow


def test_symbolic_sizes_are_compared():
    case = CASES["a reader that does not care of sizes"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(BackendCompilerFailed) as caught:
        run(case, patch, dynamic=True)
    assert "sum_1 reads" in str(caught.value)


def test_a_pass_that_changes_nothing_passes(monkeypatch):
    run(Case(lambda x: (x.sin(), x.t(), x.clone()), lambda graph: None, ""), monkeypatch)


def test_sizes_that_data_tells_are_no_obstacle(monkeypatch):
    """Run again, such an op yields another unknown size."""

    def fn(x):
        found = x[x > 0]
        return found.sin(), found.view(-1, 1) * 2, found.cos() > 0

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run(Case(fn, lambda graph: None, ""), monkeypatch)
        with pytest.raises(BackendCompilerFailed, match="gt_1 reads"):
            run(
                Case(fn, replaced(aten.cos.default, prims.convert_element_type.default, wide), ""),
                monkeypatch,
            )


def test_what_verify_runs_again_is_nothing_to_inductor():
    """Unknown sizes that a check met are no debt of the next op that torch traces."""

    def fn(q, prefix, suffix, x):
        return attention(q, prefix, suffix), x.nonzero()[1:]

    args = [*inputs(), torch.tensor([1, 0, 2, 3])]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        backend = eager_cascade(verify=True, decide="always")
        out, places = torch.compile(fn, backend=backend, fullgraph=True)(*args)
    torch.testing.assert_close(out, fn(*args)[0])
    assert places.tolist() == [[2], [3]] and last_compilation().rewritten == 1


def test_a_marker_that_is_lowered_still_yields_copies():
    """Results of `reuse_kv` are the program's own, also where nothing is reused."""
    x = torch.randn(2, 1, 5, 4)
    fresh = torch.tensor([[4], [4]])

    def fn(x, fresh):
        k, v = torch_cascade.reuse_kv(x, x[..., :4], x.sin(), x.cos(), fresh)
        return k, v

    compiled = torch.compile(fn, backend=eager_cascade(verify=True))
    for result in compiled(x, fresh):
        assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()
