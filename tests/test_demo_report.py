"""The report of tailcut demo, as text and as chromium shows it on a laptop and on a phone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from tailcut.tools.demo import png
from tailcut.tools.demo.charts import charts_of
from tailcut.tools.demo.page import Circumstances, page
from tailcut.tools.demo.results import Results
from tailcut.tools.demo.verdict import verdict
from tests.demo_results import recorded, results

FIGURES = ("accuracy", "step-times", "late-contributions", "late-means", "budget", "spending")
ABOUT = Circumstances(
    verdict="",
    place="tail-3, 4 hosts",
    description="Bursts of other traffic.",
    warning=None,
    command="tailcut demo --data '/a<b>'",
    machine={"cpu": "some", "commit": "0123456789ab"},
)
PROBE = """
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument, width = page.defaultView.innerWidth
  const box = e => e.getBoundingClientRect()
  const shown = [...page.body.querySelectorAll("*")].filter(e => box(e).width > 0)
  const beyond = shown.filter(e => box(e).right > width + 0.5 || box(e).left < 0)
  const cut = shown.filter(e => e.ownerSVGElement).filter(e => {
    const own = box(e), all = box(e.ownerSVGElement)
    return own.left < all.left - 1 || own.right > all.right + 1
      || own.top < all.top - 1 || own.bottom > all.bottom + 1 })
  document.title = JSON.stringify({
    width, scrolls: page.documentElement.scrollWidth > width,
    beyond: beyond.map(e => e.outerHTML.slice(0, 90)), cut: cut.map(e => e.outerHTML.slice(0, 90)),
    figures: [...page.querySelectorAll("figure")].map(e => e.id),
    drawings: shown.filter(e => e.tagName == "svg").map(e => e.closest("figure").id),
    text: Math.min(...shown.filter(e => e.tagName == "text").map(e => box(e).height)),
  })
})
"""


def written(found: Results, **changes: Any) -> str:
    about = Circumstances(**{**vars(ABOUT), "verdict": verdict(found), **changes})
    return page(found, charts_of(found), about)


# ---- the text ---------------------------------------------------------------------------------------------


def test_the_page_has_the_verdict_every_figure_and_how_to_do_it_again(tmp_path: Path) -> None:
    text = written(results(tmp_path))
    said = "tailcut reached 60.0 % after 7.5 s, Gloo with fp16 after 15.0 s (2.0 x)"
    assert said in text.replace("\u00a0", " ")
    for name in (*FIGURES, "traffic", "drift", "configuration"):
        assert f'id="{name}"' in text
    assert "tailcut demo --data &#x27;/a&lt;b&gt;&#x27;" in text
    assert "<td>commit</td><td>0123456789ab</td>" in text
    assert "<td>deadline_s</td>" in text
    assert "<td>worker 3</td><td>0.0012</td>" in text


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    text = written(results(tmp_path))
    assert "<script" not in text
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,"]
    assert re.findall(r"url\(|@import", text) == []
    assert 'name="viewport"' in text


def test_a_side_that_stopped_and_a_place_that_was_not_wanted_are_named(tmp_path: Path) -> None:
    text = written(results(tmp_path, gloo="rank 1 ended with 1: <error>"), warning="This is loopback.")
    assert '<p class="warning">Gloo, seed 0, stopped: rank 1 ended with 1: &lt;error&gt;</p>' in text
    assert '<p class="warning">This is loopback.</p>' in text


def test_there_is_a_page_when_nothing_worked(tmp_path: Path) -> None:
    runs = [recorded(tmp_path / side, side, 0.1, failed="it died", seconds=0) for side in ("gloo", "tailcut")]
    for run in runs:
        run.outcome.facts.clear()
    assert "No verdict: Gloo stopped (it died); tailcut stopped (it died)." in written(Results(runs, 20.0))


def test_late_shares_are_by_sender_and_receiver(tmp_path: Path) -> None:
    chart = next(chart for chart in charts_of(results(tmp_path)) if chart.name == "late-contributions")
    assert chart.shares == [[0.0, 0.01, 0.02, 0.03]] * 4


def test_pictures_are_written_where_matplotlib_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    charts = charts_of(results(tmp_path / "runs"))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)
        assert png.write_all(charts, tmp_path) == []
    pytest.importorskip("matplotlib")
    assert [path.stem for path in png.write_all(charts, tmp_path)] == list(FIGURES)
    assert all((tmp_path / f"{name}.png").stat().st_size > 1000 for name in FIGURES)


# ---- in a browser -----------------------------------------------------------------------------------------


def chromium(*options: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed (scripts/system-packages test)")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    words = [
        "--headless",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        *sandbox,
        *options,
    ]
    return subprocess.run([program, *words], capture_output=True, text=True, check=True)


@pytest.mark.parametrize(("width", "seeds"), [(1280, 1), (390, 2)])
def test_a_browser_shows_every_figure_without_errors_or_scrolling(
    width: int, seeds: int, tmp_path: Path
) -> None:
    """Windows of chromium cannot be as narrow as a phone, but frames can."""
    found = results(tmp_path / "runs", seeds)
    inside = escape(written(found, warning="This is loopback."), quote=True)
    frame = f'<iframe style="border:0" width="{width}" height="900" srcdoc="{inside}"></iframe>'
    harness = tmp_path / "harness.html"
    harness.write_text(
        f'<!doctype html><meta charset="utf-8"><body style="margin:0">{frame}<script>{PROBE}</script>'
    )
    shown = chromium(
        "--window-size=1280,900", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", harness.as_uri()
    )
    assert "CONSOLE" not in shown.stderr
    title = re.search("<title>(.*?)</title>", shown.stdout, re.DOTALL)
    assert title, shown.stderr
    seen = json.loads(unescape(title[1]))
    assert seen["width"] == width
    assert not seen["scrolls"]
    assert seen["beyond"] == []
    assert seen["cut"] == []
    assert seen["figures"] == seen["drawings"] == list(FIGURES)
    assert seen["text"] >= 12  # pixels: it is read on a phone too


def test_a_browser_opens_the_page_from_disk(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_text(written(results(tmp_path / "runs")))
    picture = tmp_path / "report.png"
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    said = chromium("--window-size=1280,900", profile, f"--screenshot={picture}", report.as_uri()).stderr
    assert "CONSOLE" not in said
    assert picture.stat().st_size > 10_000
