"""When the Triton kernels must give the same bits: again, cut otherwise, or in another batch."""

import pytest
import torch

pytest.importorskip("triton")

from support.triton_scenes import (
    PREFIX,
    SMALL,
    SUFFIX,
    Scene,
    assert_right,
    launch,
)

from torch_cascade.kernels import triton_launch
from torch_cascade.kernels.launch_config import DeviceLimits

# --- twice ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_same_call_twice(parts, device):
    segments = (PREFIX.but(branches=2, keys=37), SUFFIX, SUFFIX.but(keys=3))
    call = SMALL.but(parts=segments[:parts], sinks="H1", suffix={"mask": "ML"}).call()
    first, second = call(device), call(device)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert_right(first, call)


def test_a_prefix_without_keys_changes_no_bit(device):
    """What a part that saw nothing leaves behind has no share."""
    alone = SMALL.but(parts=(SUFFIX,)).call()
    empty = SMALL.but(parts=(PREFIX.but(branches=2, keys=0),)).call().parts
    both = alone.but(parts=[*empty, *alone.parts])
    expected = alone(device, configs=[launch(1)])
    for got, wanted in zip(both(device, configs=[launch(1, 1)]), expected, strict=True):
        assert torch.equal(got, wanted)


def test_hidden_keys_change_no_bit(device):
    """A segment cut by a length, and the same keys alone."""
    call = SMALL.but(prefix={"lens": (0.8,)}, suffix={"lens": (0.6,)}).call()
    cut = [
        part._replace(
            k=part.k[:, :, :length].contiguous(), v=part.v[:, :, :length].contiguous(), kv_lens=None
        )
        for part, length in zip(call.parts, (16, 3), strict=True)
    ]
    expected = call.but(parts=cut)(device, configs=[launch(1, 1)])
    for got, wanted in zip(call(device, configs=[launch(1, 1)]), expected, strict=True):
        assert torch.equal(got, wanted)


# --- batch invariance -----------------------------------------------------------------------------

PAGED = {"page": 3, "lens": (0.55, 0.9)}
REQUESTS = {
    "plain": Scene(n=6, parts=(PREFIX.but(keys=75), SUFFIX.but(keys=7))),
    "bfloat16": Scene(n=6, dtype=torch.bfloat16, parts=(PREFIX.but(keys=70), SUFFIX)),
    "options": Scene(
        n=6,
        sinks="H1",
        alibi=True,
        parts=(
            PREFIX.but(keys=75, positions="NM", **PAGED),
            SUFFIX.but(keys=6, positions="NM", window=4, kv_start=75),
        ),
    ),
}


def narrowed(call, rows):
    """The call with these query rows only; they are whole requests, or branches of one."""

    def cut(x, branches):
        return x[rows[0] // branches : rows[-1] // branches + 1]

    parts = []
    for part in call.parts:
        own = part.branches if len(rows) > part.branches else len(rows)
        by_row = {
            name: cut(x, part.branches)
            for name, x in part._asdict().items()
            if name in ("kv_lens", "page_table") and x is not None
        }
        if part.page_table is None:
            by_row |= {"k": cut(part.k, part.branches), "v": cut(part.v, part.branches)}
        if part.q_positions is not None:
            by_row["q_positions"] = part.q_positions[rows]
        parts.append(part._replace(branches=min(own, part.branches), **by_row))
    return call.but(q=call.q[rows], parts=parts)


@pytest.mark.parametrize("rows", [[1], [0, 1], [3, 4, 5], [5]], ids=str)
@pytest.mark.parametrize("scene", REQUESTS.values(), ids=REQUESTS)
def test_batch_invariance(scene, rows, device):
    """A branch has the same bits alone, with some of its siblings, and beside another request."""
    call = scene.call()
    whole = call(device, batch_invariant=True)
    assert_right(whole, call)
    part = narrowed(call, rows)
    alone = part(device, batch_invariant=True)
    assert_right(alone, part)
    for got, all_rows in zip(alone, whole, strict=True):
        assert torch.equal(got, all_rows[rows])


def test_batch_invariance_has_several_splits(device, monkeypatch):
    """The test above is about something: its prefix is split, and tiles are not the chosen ones."""
    seen = []
    real = triton_launch._launch_attend
    monkeypatch.setattr(
        triton_launch, "_launch_attend", lambda *args: (seen.append(args[2]), real(*args))
    )
    call = REQUESTS["plain"].call()
    call(device, batch_invariant=True)
    call(device)
    invariant, chosen = seen
    assert invariant.slots[0].splits > 1
    assert (invariant.slots, invariant.tail) != (chosen.slots, chosen.tail)


def test_invariance_whatever_the_number_of_queries(device):
    """The last query of several, and the same one alone (a step of decoding)."""
    call = Scene(n=3, parts=(PREFIX.but(keys=70), SUFFIX.but(keys=7))).call()
    last = call.but(q=call.q[:, :, 2:])
    whole, alone = call(device, batch_invariant=True), last(device, batch_invariant=True)
    for got, wanted in zip(alone, whole, strict=True):
        assert torch.equal(got, wanted[:, :, 2:])


def test_without_it_the_bits_do_depend_on_the_batch(device, monkeypatch):
    """On a device of many processors few rows are cut into more splits: what the option is for."""
    limits = DeviceLimits(processors=8, shared_memory=232448)
    monkeypatch.setattr(triton_launch, "device_limits", lambda _device: limits)
    call = Scene(n=12, parts=(PREFIX.but(keys=300), SUFFIX)).call()
    whole, alone = call(device), narrowed(call, [0, 1, 2])(device)
    assert not torch.equal(alone[0], whole[0][:3])
