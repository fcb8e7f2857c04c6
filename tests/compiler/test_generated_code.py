"""The generated code is seen, and so it is by whoever else looks."""

from __future__ import annotations

from torch._inductor.graph import GraphLowering

from torch_cascade.compiler.generated_code import capturing


def test_what_was_there_is_called_and_comes_back(monkeypatch):
    theirs = []
    monkeypatch.setattr(GraphLowering, "save_output_code", theirs.append)
    before = GraphLowering.save_output_code
    with capturing() as codes:
        GraphLowering.save_output_code("a")
        with capturing() as inner:
            GraphLowering.save_output_code("b")
    assert codes == theirs == ["a", "b"] and inner == ["b"]
    assert GraphLowering.save_output_code is before
    GraphLowering.save_output_code("c")
    assert codes == ["a", "b"]


def test_nobody_was_there(monkeypatch):
    monkeypatch.setattr(GraphLowering, "save_output_code", None)
    with capturing() as codes:
        GraphLowering.save_output_code("a")
    assert codes == ["a"] and GraphLowering.save_output_code is None


def test_a_torch_that_hands_nothing_out(monkeypatch):
    monkeypatch.delattr(GraphLowering, "save_output_code")
    with capturing() as codes:
        pass
    assert codes == [] and not hasattr(GraphLowering, "save_output_code")
