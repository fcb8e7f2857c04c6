"""The graph the passes see, without running any code generation.

`torch.compile` with Inductor's own decompositions, stopped right after `joint_custom_pre_pass`: the
rest of Inductor is replaced by a stub that interprets the graph, so a capture takes milliseconds
to seconds and its compiled function still computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from torch_cascade.passes.verify import check_lowered


def boxed(gm: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
    """An `inner_compile` that runs the graph as it is: no lowering, no code generation.

    Raises:
        GraphError: an op that Inductor could not lower.
    """
    check_lowered(gm.graph.nodes, after="the last")

    def run(args: list[Any]) -> Any:
        return gm(*args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Recorder(CustomGraphPass):
    """Keeps a copy of each graph it is shown (Inductor goes on to change the original)."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.Graph) -> None:
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        self.graphs.append(fx.GraphModule(graph.owning_module, copy))

    def uuid(self) -> None:
        return None


def joint_graphs(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = None,
    prepare: Callable[[fx.GraphModule, list[Any]], Any] | None = None,
    inner_compile: Callable[..., Any] = boxed,
    **kwargs: Any,
) -> list[fx.GraphModule]:
    """Call `fn` compiled and return every functional ATen graph (with `meta["val"]`) in order.

    Args:
        fn: function or module to compile; it is called once, without gradients.
        args: its positional arguments; `torch._dynamo.mark_dynamic` marks are respected.
        dynamic: as for `torch.compile`.
        prepare: edits each Dynamo graph, given its inputs, in place before AOTAutograd, e.g.
            `torch_cascade.compiler.capture.capture`.
        inner_compile: stands for the rest of Inductor, as for `compile_fx`.
        kwargs: keyword arguments of the call.

    Returns:
        One graph module a compiled graph; symbolic sizes keep their shape environment.
    """
    recorder = _Recorder()

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        if prepare is not None:
            prepare(gm, inputs)
        patches = {"joint_custom_pre_pass": recorder}
        return compile_fx(gm, inputs, inner_compile=inner_compile, config_patches=patches)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend, dynamic=dynamic)(*args, **kwargs)
    return recorder.graphs


def joint_graph(
    fn: Callable[..., Any],
    *args: Any,
    dynamic: bool | None = None,
    prepare: Callable[[fx.GraphModule, list[Any]], Any] | None = None,
    inner_compile: Callable[..., Any] = boxed,
    **kwargs: Any,
) -> fx.GraphModule:
    """The last graph of `joint_graphs` (a restarted compilation may show earlier drafts).

    Raises:
        ValueError: nothing was compiled.
    """
    options: dict[str, Any] = {"prepare": prepare, "inner_compile": inner_compile}
    graphs = joint_graphs(fn, *args, dynamic=dynamic, **options, **kwargs)
    if not graphs:
        raise ValueError("nothing was compiled")
    return graphs[-1]
