"""A report on a terminal: colours where there may be some, plain text everywhere else."""

from __future__ import annotations

import io
import re
import sys

import pytest
from support.shared_prefix import attention, inputs, sdpa, stack, unshared

import torch_cascade
from torch_cascade.compiler.record import Compilation
from torch_cascade.compiler.summary import Report
from torch_cascade.compiler.terminal import show
from torch_cascade.compiler.text import render

rich = pytest.importorskip("rich")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def several(q, prefix, suffix):
    left = unshared(q, prefix, suffix) + unshared(q.cos(), prefix, suffix)
    return stack(3)(q, prefix, suffix), left, sdpa(q, suffix, suffix, dropout_p=0.25)


@pytest.fixture(scope="module")
def report():
    return torch_cascade.explain(several, *inputs(700))


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def shown(report, **options):
    terminal = Terminal()
    show(report, file=terminal, **options)
    return terminal.getvalue()


def joined(text):
    return " ".join(ESCAPE.sub("", text).split())


def test_a_terminal_gets_colours_and_80_columns(report):
    text = shown(report, diff=True)
    assert ESCAPE.search(text)
    assert max(len(line.rstrip()) for line in ESCAPE.sub("", text).splitlines()) <= 80


def test_everything_of_a_site_is_there(report):
    said = joined(shown(report))
    done = next(site for site in report.sites if site.rewritten)
    place, _, code = done.where.partition(": ")
    assert f"+ 3 x {place} {code}" in said
    for segment in done.segments:
        assert f"{segment.keys} {segment.base} {segment.rows} {segment.branches}" in said
        assert segment.mask in said
    facts = done.decision.facts
    assert f"applied: {done.decision.why}" in said and "breaks even at" in said
    for way in facts.ways().values():
        assert all(" ".join(line.split()) in said for line in way.lines())
        assert all(f"{s} = {n}" in said for s, n in way.numbers().items())


def test_declines_stand_under_their_reason_with_what_to_do(report):
    said = joined(shown(report))
    assert said.count("Not rewritten: no-shared-prefix (2)") == 1
    assert "Not rewritten: dropout (1)" in said
    assert "What you can do: Call `model.eval()`, or pass dropout 0." in said
    assert said.count("K comes from") == 1  # two sites that are alike


def test_the_difference_is_what_changed_with_context(report):
    plain = ESCAPE.sub("", shown(report, diff=True))
    changes = plain[plain.index("What changed in the graph") :].splitlines()[2:]
    assert {line[:2] for line in changes if line[2:3] == "%"} == {"- ", "+ ", "  "}
    assert any("cascade.merge(" in line for line in changes)
    removed = [line for line in changes if line.startswith("- ") and "cascade.sdpa" in line]
    assert len(removed) == 3
    assert "What changed" not in shown(report)


def test_no_color_is_respected(report, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(report)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", text)
    assert joined(text)


def test_what_is_no_terminal_gets_the_plain_text(report, capsys):
    report.show()
    assert capsys.readouterr().out == f"{render(report)}\n"
    report.show(diff=True)
    assert capsys.readouterr().out == f"{render(report)}\n\n{report.diff()}\n"


def test_without_rich_a_terminal_gets_the_plain_text(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert shown(report) == f"{render(report)}\n"


def test_names_are_no_markup():
    report = torch_cascade.explain(attention, *inputs(700))
    site = report.sites[0]
    object.__setattr__(site, "where", "a[red]b.py:3: x[bold] = y[/]")
    said = joined(shown(report))
    assert "a[red]b.py:3 x[bold] = y[/]" in said


def test_graphs_of_which_little_is_known(report):
    assert "no graph was compiled" in joined(shown(Report()))
    both = Report((*report.compilations, Compilation(cached=True, compile_id="1/0")))
    assert "graph 1/0" in joined(shown(both))
