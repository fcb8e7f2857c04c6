"""How a program spells its attention: one call, or scores, mask, softmax and values by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .program_source import Source


def head_expansion(source: Source, x: str, place: str) -> list[str]:
    """Repeat KV heads for GQA: `place` "before" the row map, on a segment, or "after" the cat."""
    heads, group = source.program.heads, source.sizes.group
    if heads == "before" and place == "before":
        rows, length = f"{x}.shape[0]", f"{x}.shape[2]"
        return [f"{x} = {_repeat_kv(source, x, rows, length)}"]
    if place == "before":
        return []
    spellings = {
        "repeat_kv": _repeat_kv(source, x, source.n, source.keys(x)),
        "repeat_interleave": f"{x}.repeat_interleave({group}, 1)",
        "expand_flatten": f"{x}.unsqueeze(2).expand(-1, -1, {group}, -1, -1).flatten(1, 2)",
    }
    return [f"{x} = {spellings[heads]}"] if heads in spellings else []


def _repeat_kv(source: Source, x: str, rows: str, length: str) -> str:
    group, heads = source.sizes.group, source.sizes.heads
    expanded = f"{x}[:, :, None].expand(-1, -1, {group}, -1, -1)"
    return f"{expanded}.reshape({rows}, {heads}, {length}, {x}.shape[3])"


def attention_lines(source: Source) -> None:
    """The attention itself, once a layer; a second layer reads the first one's output as q."""
    for layer in range(source.program.layers):
        q = "q" if layer == 0 else "o"
        if source.program.form == "sdpa":
            source.add(f"o = {_sdpa(source, q)}")
        else:
            _by_hand(source, q)


def _sdpa(source: Source, q: str) -> str:
    program = source.program
    causal = program.mask.kind == "is_causal"
    mask = "None" if program.mask.kind in ("none", "is_causal") else "mask"
    keywords = []
    if program.scale is not None:
        keywords.append(f"scale={program.scale}")
    if program.heads == "enable_gqa":
        keywords.append("enable_gqa=True")
    if program.call == "keywords":
        parts = [f"query={q}", "key=k", "value=v", f"attn_mask={mask}", "dropout_p=0.0"]
        parts += [f"is_causal={causal}", *keywords]
        return f"F.scaled_dot_product_attention({', '.join(parts)})"
    if program.call == "positional":
        parts = [q, "k", "v", mask, "0.0", str(causal), *keywords]
        return f"F.scaled_dot_product_attention({', '.join(parts)})"
    parts = [q, "k", "v"]
    if mask != "None":
        parts.append("attn_mask=mask")
    if causal:
        parts.append("is_causal=True")
    owner = "torch._C._nn" if program.call == "torch_c" else "F"
    return f"{owner}.scaled_dot_product_attention({', '.join(parts + keywords)})"


def _by_hand(source: Source, q: str) -> None:
    program = source.program
    factor = program.scale_value()
    keys = "k"
    if program.scaling in ("q", "both"):
        source.add(f"qs = {q} * {factor if program.scaling == 'q' else factor**0.5}")
        q = "qs"
    if program.scaling in ("k", "both"):
        source.add(f"ks = k * {factor if program.scaling == 'k' else factor**0.5}")
        keys = "ks"
    source.add(*_scores(source, q, keys))
    if program.scores != "baddbmm":
        source.add(*_scaled(program.scaling, factor), *_masked(source))
    source.add(_softmax(program.softmax))
    if program.dropout:
        source.add("p = F.dropout(p, p=0.0, training=True)")
    source.add(_values(source))


def _scaled(scaling: str, factor: float) -> list[str]:
    if scaling == "mul":
        return [f"s = s * {factor}"]
    if scaling == "div":
        return [f"s = s / {1 / factor}"]
    return []


def _scores(source: Source, q: str, k: str) -> list[str]:
    n, m, heads = source.n, source.m, source.sizes.heads
    rows, d, keys = f"{n} * {heads}", source.sizes.features, source.keys()
    if source.program.heads == "grouped":
        shape = f"({n}, {source.sizes.kv_heads}, {source.sizes.group}, {m}, {d})"
        return [f"s = {q}.reshape{shape} @ {k}.unsqueeze(2).transpose(-1, -2)"]
    flat_q = f"{q}.reshape({rows}, {m}, {d})"
    flat_k = f"{k}.reshape({rows}, {keys}, {d}).transpose(1, 2)"
    flat = f"({rows}, {m}, {keys})"
    bias = f"torch.zeros({flat}, dtype={q}.dtype)"
    if source.program.mask.kind != "none":
        bias = f"mask.expand({n}, {heads}, {m}, {keys}).reshape{flat}"
    alpha = source.program.scale_value() if source.program.scaling == "mul" else 1.0
    return {
        "matmul": [f"s = torch.matmul({q}, {k}.transpose(2, 3))"],
        "at": [f"s = {q} @ {k}.mT"],
        "einsum": [f"s = torch.einsum('bhqd,bhkd->bhqk', {q}, {k})"],
        "bmm": [f"s = torch.bmm({flat_q}, {flat_k}).view({n}, {heads}, {m}, {keys})"],
        "baddbmm": [
            f"s = torch.baddbmm({bias}, {flat_q}, {flat_k}, beta=1.0, alpha={alpha})",
            f"s = s.view({n}, {heads}, {m}, {keys})",
        ],
    }[source.program.scores]


def _masked(source: Source) -> list[str]:
    mask = source.program.mask
    if mask.kind == "none":
        return []
    name = (
        "mask.unsqueeze(2)" if source.program.heads == "grouped" and _rank(source) == 4 else "mask"
    )
    if mask.additive is not None or mask.kind == "alibi":
        return [f"s = s + {name}"]
    fill = fill_text(source)
    if source.program.masking == "where":
        return [f"s = torch.where({name}, s, {fill})"]
    return [f"s = s.masked_fill(~{name}, {fill})"]


def _rank(source: Source) -> int:
    """Dims of the mask: only masks without a heads dim of their own go with grouped heads."""
    mask = source.program.mask
    if mask.expanded or mask.padding or mask.kind in ("padding", "isolate"):
        return 4
    if mask.kind in ("input", "tree"):
        return 2 if mask.shape == "mk" else 4
    return 4 if mask.spelling in ("positions", "row_positions") else 2


def _softmax(spelling: str) -> str:
    return {
        "method": "p = s.softmax(-1)",
        "float32": "p = F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype)",
        "to_float": "p = torch.softmax(s.float(), -1).to(v.dtype)",
        "module": "p = torch.nn.Softmax(dim=-1)(s).to(v.dtype)",
    }[spelling]


def _values(source: Source) -> str:
    n, m, heads = source.n, source.m, source.sizes.heads
    dv, keys, rows = source.sizes.value_features, source.keys(), f"{n} * {heads}"
    if source.program.heads == "grouped":
        return f"o = (p @ v.unsqueeze(2)).reshape({n}, {heads}, {m}, {dv})"
    flat = f"p.view({rows}, {m}, {keys}), v.reshape({rows}, {keys}, {dv})"
    bmm = f"o = torch.bmm({flat}).view({n}, {heads}, {m}, {dv})"
    return {
        "matmul": "o = torch.matmul(p, v)",
        "at": "o = p @ v",
        "einsum": "o = torch.einsum('bhqk,bhkd->bhqd', p, v)",
        "bmm": bmm,
        "baddbmm": bmm,
    }[source.program.scores]


def fill_text(source: Source) -> str:
    """The number that hides a key, as text."""
    if source.program.mask.fill == "inf":
        return "float('-inf')"
    dtype = "bfloat16" if source.program.autocast else source.program.dtype
    return f"torch.finfo(torch.{dtype}).min"
