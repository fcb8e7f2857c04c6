"""Records of cold compilations: kept, found, damaged, bounded; and what warm reports say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import torch_cascade
from torch_cascade.compiler import cold_record
from torch_cascade.compiler.cold_record import RecordError, keep_or_recall, read, write
from torch_cascade.compiler.record import Compilation, SiteRecord
from torch_cascade.compiler.summary import Report

TESTS = Path(__file__).parents[1]

SCRIPT = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch, torch_cascade
from support.shared_prefix import attention, inputs
from torch._dynamo.utils import counters

records = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "torch_cascade"
for given in json.loads(sys.argv[2]):
    for path in records.glob("*.record") if "records" in given else ():
        text = path.read_bytes()
        path.write_bytes(text[:-7]) if given["records"] == "damaged" else path.unlink()
    torch._dynamo.reset()
    counters.clear()
    seen = len(torch_cascade.last_report().compilations)
    keywords = {"dynamic": given.get("dynamic"), "options": {"decide": given["decide"]}}
    compiled = torch.compile(attention, backend="cascade", **keywords)
    for prefix in given["prefixes"]:
        args = inputs(prefix)
        torch.testing.assert_close(compiled(*args), attention(*args))
    report = torch_cascade.last_report()
    report = type(report)(report.compilations[seen:])
    print(json.dumps({
        "graphs": json.loads(report.to_json())["graphs"],
        "text": " ".join(str(report).split()),
        "page": report.html(),
        "counters": counters["cascade"],
        "aot": counters["aot_autograd"]["autograd_cache_hit"],
        "fx": counters["inductor"]["fxgraph_cache_hit"],
    }))
"""
ALWAYS = {"decide": "always", "prefixes": [37]}
BOTH_SIDES = {"decide": "auto", "dynamic": True}
FOUND = ("sites", "blend", "linears", "before", "after")


def process(folder, *runs, autograd=True):
    """What each of some runs, in a process of its own, has to say; and its log."""
    first = str(Path(torch_cascade.__file__).parents[1])
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR_")}
    env |= {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": str(int(autograd)),
        "PYTHONPATH": os.pathsep.join(filter(None, [first, env.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-c", SCRIPT, str(TESTS), json.dumps(runs)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()], run.stderr


def found(result):
    """What the passes of each graph found, and did."""
    return [{name: graph[name] for name in FOUND} for graph in result["graphs"]]


# --- across processes -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A cold run, then in another process: a warm one, one with a damaged record, one without."""
    folder = tmp_path_factory.mktemp("cache")
    (cold,), _ = process(folder, ALWAYS)
    others, log = process(
        folder, ALWAYS, ALWAYS | {"records": "damaged"}, ALWAYS | {"records": "gone"}
    )
    return cold, *others, log


def test_a_warm_compilation_reports_the_cold_one(runs):
    cold, warm, *_ = runs
    assert cold["aot"] == 0 and warm["aot"] == 1
    (a,), (b,) = cold["graphs"], warm["graphs"]
    assert not a["cached"] and a["origin"] == ""
    assert b["cached"] and b["origin"].startswith("from the cold compile of 20")
    assert found(cold) == found(warm) and found(warm)[0]["sites"][0]["rewritten"]
    assert set(b["seconds"]) == {"capture", "total"}
    assert cold["counters"] == warm["counters"] == {"sites": 1, "rewritten": 1}
    assert f"1 of 1 attention sites rewritten; {b['origin']}, its artefact came" in warm["text"]
    assert b["origin"] in warm["page"] and "the passes did not run" in warm["page"]


def test_a_damaged_record_is_reported_as_such(runs):
    _, _, damaged, _, log = runs
    said = "the record of its cold compile is damaged: its checksum is another"
    (graph,) = damaged["graphs"]
    assert graph["cached"] and not graph["sites"] and graph["origin"] == said
    assert said in damaged["text"] and "is damaged" in log


def test_without_a_record_the_report_says_so(runs):
    (graph,) = runs[3]["graphs"]
    assert graph["cached"] and not graph["sites"]
    assert graph["origin"] == "no record of its cold compile was found"
    assert graph["origin"] in runs[3]["text"] and graph["origin"] in runs[3]["page"]


def test_inductors_own_cache_runs_the_passes_anyway(tmp_path):
    (cold,), _ = process(tmp_path, ALWAYS, autograd=False)
    (warm,), _ = process(tmp_path, ALWAYS, autograd=False)
    assert (cold["aot"], cold["fx"], warm["aot"], warm["fx"]) == (0, 0, 0, 1)
    (graph,) = warm["graphs"]
    assert not graph["cached"] and graph["sites"] and set(graph["seconds"]) > {"lower"}


def test_dynamic_shapes_find_the_record_of_their_side_of_the_guard(tmp_path):
    """Under one key of torch's lie the artefacts of both sides."""
    (cold,), _ = process(tmp_path, BOTH_SIDES | {"prefixes": [11, 20_000]})
    sides = [[s["rewritten"] for s in g["sites"]] for g in cold["graphs"]]
    assert sides == [[False], [True]]
    assert len([*(tmp_path / "torch_cascade").glob("*.record")]) == 2
    (same, other), _ = process(
        tmp_path,
        BOTH_SIDES | {"prefixes": [11, 20_000]},
        BOTH_SIDES | {"prefixes": [20_000, 11]},
    )
    assert same["aot"] == 2 and found(same) == found(cold)
    # With the long prefix first the guard is another, so an artefact may be a new one.
    assert [g["sites"][0]["rewritten"] for g in other["graphs"]] == [True, False]


# --- in this process ------------------------------------------------------------------------------


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr(cold_record, "folder", lambda: tmp_path / "records")
    return tmp_path / "records"


def test_what_identifies_an_artefact(records):
    site = SiteRecord("sdpa", "here")
    keep_or_recall(Compilation(sites=[site], before="b", after="a"), ["code"], "uuid")
    warm = Compilation(cached=True)
    keep_or_recall(warm, ["code"], "uuid")
    assert (warm.sites, warm.before, warm.after) == ([site], "b", "a")
    for codes, uuid in ((["code", "more"], "uuid"), (["code"], "other"), ([], "uuid")):
        other = Compilation(cached=True)
        keep_or_recall(other, codes, uuid)
        assert other.origin == "no record of its cold compile was found" and not other.sites


def test_what_is_never_cached_is_not_kept(records):
    keep_or_recall(Compilation(), ["code"], None)
    keep_or_recall(Compilation(), [], "uuid")
    with torch._inductor.config.patch(force_disable_caches=True):
        keep_or_recall(Compilation(), ["code"], "uuid")
    assert not records.exists()


def test_a_folder_that_cannot_be_written_costs_the_record_only(records, caplog):
    records.parent.joinpath("records").write_text("a file")
    keep_or_recall(Compilation(), ["code"], "uuid")
    assert "the record for later, warm compilations is not kept" in caplog.text
    warm = Compilation(cached=True)
    keep_or_recall(warm, ["code"], "uuid")
    assert warm.origin == "the record of its cold compile cannot be read: Not a directory"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[:-1], "damaged"),
        (lambda text: text[:30], "damaged"),
        (lambda text: b"", "damaged"),
        (lambda text: text.replace(b"record 2", b"record 1"), "damaged"),
        (lambda text: text[:-1] + bytes([text[-1] ^ 1]), "damaged"),
    ],
)
def test_damage_is_seen_before_anything_is_unpickled(damage, said, tmp_path, monkeypatch):
    path = tmp_path / "x.record"
    write(path, {"sites": []})
    assert read(path) == {"sites": []}
    path.write_bytes(damage(path.read_bytes()))
    monkeypatch.setattr(cold_record.pickle, "loads", None)
    with pytest.raises(RecordError, match=said):
        read(path)


class Gone:
    """A class that a later version no longer has."""


def test_a_record_of_classes_that_are_gone_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "x.record"
    write(path, {"sites": [Gone()]})
    monkeypatch.delattr(sys.modules[__name__], "Gone")
    with pytest.raises(RecordError, match="cannot be read"):
        read(path)


def test_the_longest_unused_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(cold_record, "_LIMIT", 3000)
    for number in range(8):
        write(tmp_path / f"{number}.record", {"text": os.urandom(700)})
        os.utime(tmp_path / f"{number}.record", (number, number))
        if number == 3:
            os.utime(tmp_path / "1.record", (100, 100))  # it was of use
    left = {path.name for path in tmp_path.iterdir()}
    assert "1.record" in left and "7.record" in left and "0.record" not in left
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3000


def test_writers_at_once_leave_whole_records(tmp_path):
    def work(number):
        for _ in range(20):
            write(tmp_path / "same.record", {"number": number})
            assert read(tmp_path / "same.record")["number"] in range(4)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == ["same.record"]


def test_reports_of_the_unknown_say_why():
    said = str(Report((Compilation(cached=True, origin="no record was found"),)))
    assert "came from Inductor's cache; the passes did not run; no record was found" in said
