"""`report.html` in headless Chromium, where there is one: widths, colours, keyboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import torch
from support.backend import eager_cascade
from support.html_reader import Reader
from support.shared_prefix import attention, inputs, stack

from torch_cascade.compiler.chosen import ChosenTokens, Part, Stage

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
PROBE = """<script>addEventListener("load", () => {
const wide = document.documentElement.scrollWidth, style = getComputedStyle(document.body);
const focus = [...document.querySelectorAll("summary,.scroll,a")].map(e => (e.focus(),
document.activeElement === e || !e.checkVisibility()));
document.title = JSON.stringify({wide, window: innerWidth, focus: focus.every(Boolean),
colours: [style.color, style.backgroundColor], panels: [...document.querySelectorAll(".panel")]
.filter(e => e.checkVisibility()).map(e => e.getBoundingClientRect()).map(r => [r.right, r.bottom])
}) })</script>"""
HEIGHT = 900


in_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
widths = pytest.mark.parametrize("width", [320, 1280])
schemes = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


@in_browser
@widths
@schemes
def test_a_report(tmp_path, width, dark):
    for fn in (attention, stack(3)):
        backend = eager_cascade(dump=str(tmp_path / "dump"), decide="always")
        torch.compile(fn, backend=backend)(*inputs())
    page = (tmp_path / "dump/report.html").read_text(encoding="utf-8")
    panel = re.search(r'id="(g001-after-[a-z_0-9]+)" class="panel"', page)[1]
    found = looked_at(tmp_path, page, width, dark, panel)
    ((right, bottom),) = found["panels"]  # the target's alone, within the window
    assert right <= width and bottom <= HEIGHT
    assert not looked_at(tmp_path, page, width, dark)["panels"]


@in_browser
@widths
@schemes
def test_chosen_tokens(tmp_path, width, dark):
    parts = ((Part(0, 300, 300), Part(300, 320, 0)),)
    stages = (Stage(1, torch.arange(320)[None, ::2]), Stage(5, torch.arange(320)[None, ::4]))
    looked_at(tmp_path, ChosenTokens(torch.arange(320)[None], parts, stages).html(), width, dark)


def looked_at(tmp_path, page, width, dark, target=""):
    """What a browser says of a page, after what every page must hold was checked."""
    # In a frame of its own: a browser's window cannot be made as narrow as a phone's.
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    (tmp_path / "page.html").write_text(page.replace("</body>", f"{PROBE}</body>"))
    (tmp_path / "frame.html").write_text(
        f'<iframe src="page.html#{target}" style="width:{width}px;height:{HEIGHT}px;border:0">'
        "</iframe><script>"
        "setTimeout(() => document.body.textContent = frames[0].document.title, 900)</script>"
    )
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", *scheme]
    command += ["--allow-file-access-from-files", "--virtual-time-budget=3000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "frame.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = json.loads(re.search(r"\{.*\}", Reader(dom).text)[0])
    assert found["window"] == width and found["wide"] <= width and found["focus"]
    text, back = [sum(map(int, re.findall(r"\d+", c)[:3])) for c in found["colours"]]
    assert (text > 600 > 200 > back) if dark else (back > 600 > 200 > text)
    return found
