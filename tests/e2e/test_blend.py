"""Blends in generated code."""

import torch
from support.blend_plain import Plain, compiled, inputs
from support.tolerance import assert_close_to_reference
from torch.utils._pytree import tree_map_only

OPTIONS = {"decide": "always", "strict": True, "check_layers": "0:0.4,1:0.2"}


def picked(x):
    """A token of each row, wherever it stands."""
    return x[torch.arange(3), torch.tensor([3, -1, 8])]


def test_generated_code_is_like_the_interpreted_graph():
    """A batch of three, gradual, tokens by an index; in float32 against float64."""
    model, options = Plain(then=picked), OPTIONS | {"selector": "random"}
    args = inputs(batch=3)
    double = tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, args)
    eager, record = compiled(model, *args, **options)
    exact, _ = compiled(Plain(then=picked).double(), *double, **options)
    assert record.layers == ("checked", "checked", "reused")
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(model, backend="cascade", options=options)(*args)
    assert_close_to_reference(got, eager, exact)
