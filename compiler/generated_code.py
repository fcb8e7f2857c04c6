"""The code that Inductor generates, as it generates it or finds it in a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def capturing() -> Iterator[list[str]]:
    """The texts that Inductor's code generation hands out inside the context, in order.

    `GraphLowering.save_output_code` is None or a function that is given each text: also one that
    comes with an artefact from a cache. Torch's own tools use it (`run_and_get_code`); what they
    have put there is called as well. The list stays empty where torch hands nothing out.
    """
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    if not hasattr(GraphLowering, "save_output_code"):
        yield codes
        return
    theirs = GraphLowering.save_output_code

    def save(code: str) -> None:
        codes.append(code)
        if theirs is not None:
            theirs(code)

    GraphLowering.save_output_code = save
    try:
        yield codes
    finally:
        GraphLowering.save_output_code = theirs
