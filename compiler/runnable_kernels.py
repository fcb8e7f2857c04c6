"""Triton kernels in a graph's text: torch names them by numbers that mean something in one process.

A call of a kernel holds its number in a table of the process, and that of a dict of constants. In a
file they become names of the file's own table, which imports the kernels.
"""

from __future__ import annotations

import ast
import importlib
import re
from typing import Any

from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)

_CALLS = (triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation)
_NUMBERS = {"kernel_idx": "KERNELS", "constant_args_idx": "CONSTANT_ARGS"}
_WRITTEN = re.compile(r"\b(kernel_idx|constant_args_idx) = (\d+)")

_TABLE = """
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
{imports}

KERNELS = {{
{kernels}
}}
CONSTANT_ARGS = {{
{constants}
}}
"""


class NotRunnable(ValueError):
    """A graph that cannot be written as a file that runs; the text says why."""


def by_name(code: str) -> str:
    """Code in which kernels and constants are looked up in the file's table.

    Example:
        >>> by_name("f(kernel_idx = 3, constant_args_idx = 0, n = 1)")
        'f(kernel_idx = KERNELS[3], constant_args_idx = CONSTANT_ARGS[0], n = 1)'
    """
    return _WRITTEN.sub(lambda match: f"{match[1]} = {_NUMBERS[match[1]]}[{match[2]}]", code)


def table(graphs: list[fx.Graph]) -> str:
    """The table of a file; "" for graphs without kernels.

    Raises:
        NotRunnable: a kernel cannot be imported, or a constant has no text.
    """
    calls = [node for graph in graphs for node in graph.nodes if node.target in _CALLS]
    if not calls:
        return ""
    kernels = {node.kwargs["kernel_idx"]: node for node in calls}
    constants = {node.kwargs["constant_args_idx"]: node for node in calls}
    names = {index: _import_of(kernel_side_table.get_kernel(index)) for index in kernels}
    return _TABLE.format(
        imports="\n".join(sorted({f"import {module}" for module, _ in names.values()})),
        kernels="\n".join(
            f"    {index}: kernel_side_table.add_kernel({module}.{name}),"
            for index, (module, name) in sorted(names.items())
        ),
        constants="\n".join(
            f"    {index}: kernel_side_table.add_constant_args({_literal(index)}),"
            for index in sorted(constants)
        ),
    )


def _import_of(kernel: Any) -> tuple[str, str]:
    """Module and name of a kernel."""
    function = kernel
    while hasattr(function, "fn"):  # autotuners and the like are around a kernel
        function = function.fn
    module, name = function.__module__, function.__name__
    if getattr(importlib.import_module(module), name, None) is not kernel:
        raise NotRunnable(f"the Triton kernel {name} cannot be imported from {module}")
    return module, name


def _literal(index: int) -> str:
    constants = kernel_side_table.get_constant_args(index)
    try:
        ast.literal_eval(repr(constants))
    except (ValueError, SyntaxError):
        raise NotRunnable(f"constants of a Triton kernel have no text: {constants}") from None
    return repr(constants)
