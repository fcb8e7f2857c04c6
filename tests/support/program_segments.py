"""How a program spells a segment of keys: how it is stored, written to, and given to the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .program_spec import Segment

if TYPE_CHECKING:
    from .program_source import Source


def load_joint(source: Source, index: int) -> list[str]:
    """K and V of a segment out of one input."""
    both, d, dv = f"kv{index}", source.sizes.features, source.sizes.value_features
    source.take(both, "kv", index)
    storage = source.program.segments[index].storage
    if storage == "stacked":
        return [f"k{index}, v{index} = {both}[0], {both}[1]"]
    if storage == "unbind":
        return [f"k{index}, v{index} = {both}.unbind(0)"]
    return [f"k{index}, v{index} = {both}.split([{d}, {dv}], -1)"]


def load_one(source: Source, x: str, name: str, storage: str) -> list[str]:
    """Bring an input to [rows, heads, keys, features]."""
    heads = source.sizes.kv_heads
    d = source.sizes.features if name == "k" else source.sizes.value_features
    load = {
        "bhld": "",
        "blhd": f"{x}.transpose(1, 2)",
        "permute": f"{x}.permute(0, 2, 1, 3)",
        "bhdl": f"{x}.transpose(-1, -2)",
        "merged": f"{x}.view({x}.shape[0] // {heads}, {heads}, *{x}.shape[1:])",
        "flat": f"{x}.view(*{x}.shape[:2], {heads}, {d}).transpose(1, 2)",
        "slice": f"{x}[:, :, 2:-1]",
        "narrow": f"{x}.narrow(2, 2, {x}.shape[2] - 3)",
        "rows": f"{x}[1:]",
    }[storage]
    return [f"{x} = {load}"] if load else []


def write_keys(source: Source, index: int, name: str) -> list[str]:
    """Write new keys into a buffer that has room for them."""
    x, new = f"{name}{index}", source.take(f"new_{name}{index}", f"new_{name}", index)
    if name == "k" and source.program.segments[index].write != "slice_copy":
        source.take(f"at{index}", "at", index)
    at = f"at{index}"
    return {
        "index_copy": [f"{x} = {x}.index_copy(2, {at}, {new})"],
        "index_copy_": [f"{x}.index_copy_(2, {at}, {new})"],
        "setitem": [f"{x}[:, :, {at}] = {new}"],
        "index_put": [
            f"{x} = {x}.transpose(0, 2).index_put(({at},), {new}.transpose(0, 2))",
            f"{x} = {x}.transpose(0, 2)",
        ],
        "slice_copy": [f"{x} = {x}.clone()", f"{x}[:, :, : {new}.shape[2]] = {new}"],
    }[source.program.segments[index].write]


def map_rows(source: Source, x: str, index: int, spelling: str) -> list[str]:
    """Give every row of the batch its row of a segment's base."""
    segment: Segment = source.program.segments[index]
    if segment.rows == "own" or spelling == "outside":
        return []
    if segment.rows == "all":
        return [f"{x} = {_broadcast(source, x, spelling)}"]
    if segment.rows == "modulo":
        return [f"{x} = {_tile(source, x, source.group(index), spelling)}"]
    return [f"{x} = {_interleave(source, x, source.group(index), spelling)}"]


def _broadcast(source: Source, x: str, spelling: str) -> str:
    n, outer = source.n, source.number("requests * mid", source.sizes.requests * source.sizes.mid)
    inner = source.number("branches", source.sizes.branches)
    return {
        "expand": f"{x}.expand({n}, -1, -1, -1)",
        "expand_sizes": f"{x}.expand({n}, *{x}.shape[1:])",
        "broadcast_to": f"torch.broadcast_to({x}, ({n}, *{x}.shape[1:]))",
        "repeat": f"{x}.repeat({n}, 1, 1, 1)",
        "repeat_interleave": f"{x}.repeat_interleave({n}, 0)",
        "select_expand": f"{x}[0].expand({n}, -1, -1, -1)",
        "index_zeros": f"{x}[torch.zeros({n}, dtype=torch.int64)]",
        "two_steps": f"{x}.expand({outer}, -1, -1, -1).repeat_interleave({inner}, 0)",
    }[spelling]


def _interleave(source: Source, x: str, t: str, spelling: str) -> str:
    n = source.n
    constant = [b // int(t) for b in range(source.sizes.rows)] if t.isdigit() else []
    return {
        "repeat_interleave": f"{x}.repeat_interleave({t}, dim=0)",
        "repeat_interleave_function": f"torch.repeat_interleave({x}, {t}, 0)",
        "expand_reshape": f"{x}.unsqueeze(1).expand(-1, {t}, -1, -1, -1)"
        f".reshape({n}, *{x}.shape[1:])",
        "expand_flatten": f"{x}[:, None].expand(-1, {t}, -1, -1, -1).flatten(0, 1)",
        "repeat_flatten": f"{x}.unsqueeze(1).repeat(1, {t}, 1, 1, 1).flatten(0, 1)",
        "index_select": f"{x}.index_select(0, torch.arange({n}) // ({t}))",
        "index_arange": f"{x}[torch.arange({x}.shape[0]).repeat_interleave({t})]",
        "index_constant": f"{x}[torch.tensor({constant})]",
        "stack": f"torch.stack([{x}] * {t}, 1).flatten(0, 1)",
    }[spelling]


def _tile(source: Source, x: str, t: str, spelling: str) -> str:
    n = source.n
    return {
        "repeat": f"{x}.repeat({t}, 1, 1, 1)",
        "expand_reshape": f"{x}.unsqueeze(0).expand({t}, -1, -1, -1, -1)"
        f".reshape({n}, *{x}.shape[1:])",
        "cat": f"torch.cat([{x}] * {t})",
        "index_arange": f"{x}[torch.arange({n}) % {x}.shape[0]]",
    }[spelling]
