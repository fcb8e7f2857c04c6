"""How many tokens are asked for: none, or a number that is known when the graph runs."""

import pytest
import torch
from support.backend import eager_cascade, last_compilation
from support.blend_plain import Plain, T, compiled, inputs

NONE = {
    "a slice": lambda x: x[:, T:],
    "a slice from further on": lambda x: x[:, T + 5 :],
    "a piece of a split": lambda x: x.split([T - 2, 2, 0], 1)[2],
    "sequence first": lambda x: x.transpose(0, 1)[T:],
    "beside the last": lambda x: torch.cat([x[:, T:], x[:, -1:]], 1),
}


@pytest.mark.parametrize("name", NONE)
def test_no_tokens_are_none(name):
    model, args = Plain(then=NONE[name]), inputs(batch=3)
    got, record = compiled(model, *args, recompute_ratio=1, strict=True, verify=True)
    with torch.no_grad():
        torch.testing.assert_close(got, model(*args))
    assert record.layers == ("computed", "checked", "reused")
    reused, record = compiled(model, *args, recompute_ratio=0, strict=True, verify=True)
    assert reused.shape == got.shape and record.stages[0].now == 2


NUMBERS = {
    "the last five": lambda x, n: x[:, -5:],
    "the last n": lambda x, n: x[:, -n:],
    "from n": lambda x, n: x[:, n:],
}
SIZES = ((31, 5), (47, 2), (40, 40), (23, 7))


@pytest.mark.parametrize("ratio", ["1", "0.15"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_is_no_constant(name, ratio):
    """One graph for all lengths and numbers; of 40 tokens from the 40th on there are none."""
    model, taken = Plain(then=lambda x: x), NUMBERS[name]
    torch._dynamo.reset()
    backend = eager_cascade(decide="always", recompute_ratio=ratio, strict=True)

    def asked(x, cached, fresh, n):
        return taken(model(x, cached, fresh), n)

    fn = torch.compile(asked, backend=backend, dynamic=True)
    for tokens, n in SIZES:
        args = (*inputs(2, tokens=tokens), n)
        with torch.no_grad():
            got, usual = fn(*args), asked(*args)
        assert last_compilation().blend.layers == ("computed", "checked", "reused")
        assert got.shape == usual.shape
        if ratio == "1":
            torch.testing.assert_close(got, usual)
