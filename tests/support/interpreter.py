"""Triton kernels on CPU tensors in any process, by Triton's own interpreter.

TRITON_INTERPRET=1 before the import of triton does the same for a whole process, but then no kernel
can be compiled or traced in it any more. Here kernels stay what they are, and are interpreted
inside `interpreted()` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy
import torch


class _NoScope:
    """What `_patch_lang` returns where everything is patched already."""

    def restore(self) -> None:
        pass


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, the kernels of this package run in the interpreter."""
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    from torch_cascade.kernels import launchable

    made: dict[Any, Any] = {}

    def function(kernel: Any) -> Any:
        if not isinstance(kernel, JITFunction):
            return kernel  # TRITON_INTERPRET=1
        if kernel.fn not in made:
            made[kernel.fn] = interpreter.InterpretedFunction(kernel.fn)
        return made[kernel.fn]

    def call(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return function(kernel)(*args, **kwargs)

    with ExitStack() as stack:
        patch_once = _patching_once(interpreter._patch_lang, stack)
        for owner, name, value in (
            (interpreter, "_patch_lang", patch_once),
            (JITFunction, "__call__", call),  # device functions, those of triton.language too
            (launchable, "called", function),
            (numpy, "matmul", _product),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        builder = interpreter.InterpreterBuilder
        stack.enter_context(mock.patch.multiple(builder, **_repaired(builder)))
        yield


def _product(a: Any, b: Any, dtype: Any) -> Any:
    """A tile's product, written out.

    With some CPUs' BLAS the last bits of a row depend on where in the tile it stands.
    """
    return numpy.einsum("...mk,...kn->...mn", a, b, dtype=dtype)


def _patching_once(patch: Callable[[Any], Any], stack: ExitStack) -> Callable[[Any], Any]:
    """`patch(fn)`, undone at the end of `stack`, and once for all functions of a module.

    The interpreter patches the language at every call of a device function, a third of its time,
    and does not undo that.
    """
    seen: set[str] = set()

    def once(fn: Any) -> Any:
        if fn.__module__ not in seen:
            seen.add(fn.__module__)
            stack.callback(patch(fn).restore)
        return _NoScope()

    return once


def _repaired(builder: Any) -> dict[str, Callable[..., Any]]:
    """Methods of the interpreter, repaired.

    It has the bits of bfloat16 as integers: it multiplies these in `tl.dot`, and cuts off what it
    should round (seen in Triton 3.6). Some masks are int64, which it then does not take (3.9).
    """
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def is_bfloat16(handle: Any) -> bool:
        return bool(handle.dtype.scalar == tl.bfloat16) and handle.data.dtype.itemsize == 2

    def single(handle: Any) -> Any:
        if not is_bfloat16(handle):
            return handle
        bits = handle.data.view("uint16").astype("uint32") << 16
        return TensorHandle(bits.view("float32"), tl.float32)

    def boolean(mask: Any) -> Any:
        return TensorHandle(mask.data.astype(bool), tl.int1)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original["create_dot"](self, single(a), single(b), *rest)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        cast = original["cast_impl"](self, src, dst_type)
        if src.dtype.scalar == tl.float32 and is_bfloat16(cast):
            rounded = torch.from_numpy(src.data.copy()).bfloat16().view(torch.int16)
            cast.data = rounded.numpy().view(cast.data.dtype)
        return cast

    def create_masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return original["create_masked_load"](self, pointers, boolean(mask), *rest)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return original["create_masked_store"](self, pointers, value, boolean(mask), *rest)

    changed = {
        "create_dot": create_dot,
        "cast_impl": cast_impl,
        "create_masked_load": create_masked_load,
        "create_masked_store": create_masked_store,
    }
    original = {name: getattr(builder, name) for name in changed}
    return changed
