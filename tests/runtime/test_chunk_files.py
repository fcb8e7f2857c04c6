"""Chunks on disk: killed writers, other processes, and files that are not what they seem."""

import os
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("transformers")

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.blending import cached_at
from support.hf_models import tiny_model
from support.source import ROOT

from torch_cascade import ChunkStore
from torch_cascade.runtime.chunk_files import ChunkFileError, ChunkFolder

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
CHUNK, QUESTION = list(range(10, 23)), [5, 6, 7]


def make_model():
    torch.manual_seed(3)
    return tiny_model("Llama", torch.float32)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def written(model, tmp_path):
    """A folder with one chunk, and its file."""
    store = ChunkStore(model, folder=tmp_path)
    name = store.add(CHUNK)
    return tmp_path, tmp_path / f"{name}.safetensors"


def reader(model, folder):
    return ChunkStore(model, cpu_bytes=0, folder=folder)


def header(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def truncate(path, model):
    path.write_bytes(path.read_bytes()[:-100])


def garble_header(path, model):
    content = bytearray(path.read_bytes())
    content[20:40] = b"\xff" * 20
    path.write_bytes(content)


def empty(path, model):
    path.write_bytes(b"")


def foreign(path, model):
    save_file({"weight": torch.ones(3)}, path)


def other_model(path, model):
    save_file(load_file(path), path, header(path) | {"model": "0" * 64})


def other_tokens(path, model):
    tensors = load_file(path)
    tensors["ids"][0] += 1
    save_file(tensors, path, header(path))


def missing_layer(path, model):
    tensors = load_file(path)
    del tensors["values.1"]
    save_file(tensors, path, header(path))


FAULTS = {
    truncate: "not a readable chunk",
    garble_header: "not a readable chunk",
    empty: "not a readable chunk",
    foreign: "format None",
    other_model: "computed by another model, 000",
    other_tokens: "its ids are not those that its name says",
    missing_layer: "incomplete, ..values.1",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_wrong_file_is_refused_with_its_reason_and_written_anew(fault, model, written):
    folder, path = written
    fault(path, model)
    store = reader(model, folder)
    with pytest.warns(UserWarning, match=FAULTS[fault]):
        blended = store.blend([CHUNK, QUESTION])
    assert blended.report.reused == 0
    assert path.name in blended.report.refused[0] and path.name in str(store.report())
    store.add(CHUNK)
    assert store.blend([CHUNK, QUESTION]).report.reused == len(CHUNK)
    assert reader(model, folder).blend([CHUNK, QUESTION]).report.reused == len(CHUNK)


def test_flipped_bits_are_found_when_a_layer_is_read(model, written):
    folder, path = written
    tensors = load_file(path)
    tensors["values.1"].view(torch.int32)[0, 3, 0] ^= 1
    save_file(tensors, path, header(path))
    store = reader(model, folder)
    forward = torch.compile(model, backend="eager")
    with torch.no_grad(), pytest.raises(ChunkFileError, match="values of layer 1 are corrupted"):
        forward(**store.blend([CHUNK, QUESTION]))
    assert store.blend([CHUNK, QUESTION]).report.reused == 0  # not tried again
    store.add(CHUNK)
    blended = store.blend([CHUNK, QUESTION])
    for layer in range(2):
        cached_at(blended, layer, 0)


def test_other_files_are_left_alone(model, written):
    folder, path = written
    for name in ("notes.safetensors", "readme.txt"):
        (folder / name).write_text("mine")
    fresh, stale = folder / ".x.tmp", folder / ".y.tmp"
    for unfinished in (fresh, stale):
        unfinished.write_text("")
    os.utime(stale, (time.time() - 4000,) * 2)
    store = ChunkStore(model, cpu_bytes=0, disk_bytes=path.stat().st_size, folder=folder)
    store.add([*CHUNK[1:]])
    assert sorted(p.name for p in folder.iterdir() if len(p.name) < 60) == [
        ".x.tmp",
        "notes.safetensors",
        "readme.txt",
    ]
    assert not path.exists()


def test_a_file_deleted_while_it_is_read(model, written):
    """Another process may evict what this one has just found."""
    folder, path = written
    blended = reader(model, folder).blend([CHUNK, QUESTION])
    path.unlink()
    wanted = ChunkStore(model)
    wanted.add(CHUNK)
    fresh = wanted.blend([CHUNK, QUESTION])
    for got, kept in zip(cached_at(blended, 1, 0), cached_at(fresh, 1, 0), strict=True):
        assert torch.equal(got, kept)


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from torch_cascade.runtime.chunk_files import ChunkFolder
from torch_cascade.runtime.chunks import Chunk, ChunkKey

folder, mode = ChunkFolder(Path(sys.argv[1]), int(sys.argv[2])), sys.argv[3]
if mode == "killed":
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
opened = 0
for step in range(150):
    tokens = 5 + step % 7
    key = ChunkKey("model", tuple(range(tokens)))
    states = torch.arange(3 * tokens * 8.0).view(3, tokens, 8)
    folder.write(Chunk(key, (), ((states, -states), (states + 1, states - 1))))
    file = folder.open(ChunkKey("model", tuple(range(5 + step * 3 % 7))), ())
    if file is None:
        continue
    opened += 1
    for layer in range(2):
        keys, values = file.layer(layer)
        assert torch.equal(keys, torch.arange(float(keys.numel())).view_as(keys) + layer)
        assert torch.equal(values, keys - 2 if layer else -keys)
print(opened)
"""


def start(folder, budget, mode):
    """A process that writes seven chunks again and again, and reads others of them."""
    arguments = [sys.executable, "-W", "ignore", "-c", SCRIPT, folder, budget, mode]
    return subprocess.Popen(
        [str(a) for a in arguments],
        cwd=ROOT.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_writer_killed_in_the_middle_leaves_no_chunk(tmp_path):
    process = start(tmp_path, 10**6, "killed")
    process.communicate(timeout=120)
    assert process.returncode == -9
    left = list(tmp_path.iterdir())
    assert len(left) == 1 and left[0].name.endswith(".tmp")
    assert not ChunkFolder(tmp_path, None).sizes()


def test_processes_share_a_folder_and_its_budget(tmp_path):
    """Files vanish and appear under those who read them; nobody sees half of one."""
    budget = 12_000  # two or three of the seven
    processes = [start(tmp_path, budget, "writes") for _ in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert all(int(out) > 20 for out, _ in results)
    files = list(tmp_path.iterdir())
    assert 1 <= len(files) < 7 and all(file.name.endswith(".safetensors") for file in files)
    ChunkFolder(tmp_path, budget).evict()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= budget


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
def test_files_of_a_prompt_are_read_ahead(model, tmp_path, monkeypatch):
    """All at once, before the first is opened; not those of chunks that are in memory."""
    a, b, missing = [5, 6, 7], [8, 9, 10, 11], [12, 13]
    store = ChunkStore(model, folder=tmp_path)
    for chunk in (a, b):
        store.add(chunk)
    events = []
    opened = ChunkFolder.open
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: events.append(args[1:]))
    monkeypatch.setattr(ChunkFolder, "open", lambda *args: events.append("open") or opened(*args))
    store.blend([a, b, [14, 15]])
    ahead = (0, 0, os.POSIX_FADV_WILLNEED)
    assert ahead not in events
    events.clear()
    fresh = ChunkStore(model, cpu_bytes=0, folder=tmp_path)
    assert fresh.blend([a, missing, b, [14, 15]]).report.reused == len(a) + len(b)
    assert events.count(ahead) == 2 and events.index("open") == 2
