"""The report: one page of HTML that needs nothing but itself, and opens from disk."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from tailcut.tools.demo.charts import Chart
from tailcut.tools.demo.results import NAMES, TAILCUT, Results
from tailcut.tools.demo.svg import NARROW, WIDE, draw
from tailcut.tools.demo.verdict import figure_text


@dataclass(frozen=True)
class Circumstances:
    """What the page says besides the results."""

    verdict: str
    place: str
    description: str
    """The scenario's own."""
    warning: str | None
    """Why this is not what was wanted."""
    command: str
    machine: Mapping[str, str | int]
    """With the commit, if there is one."""


def page(results: Results, charts: Sequence[Chart], about: Circumstances) -> str:
    style = (resources.files("tailcut.tools.demo") / "page.css").read_text()
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',  # otherwise browsers ask for one
        f"<title>tailcut demo</title><style>{style}</style></head><body>",
        f"<h1>The same training over {_listed([NAMES[side] for side in results.sides])}</h1>",
        f'<p class="verdict">{escape(_sentence(about.verdict))}</p>',
        *([_warning(about.warning)] if about.warning else []),
        *_setting(results, about),
        _sides(results),
        *_failures(results),
        *map(_figure, charts),
        *_tailcut(results),
        "<h2>Do it again</h2>",
        f"<pre>{escape(about.command)}</pre>",
        "<h2>Machine and versions</h2>",
        _facts(about.machine),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _sentence(text: str) -> str:
    """The verdict, with numbers that keep their units on the same line."""
    begun = text if text.startswith(TAILCUT) else text[0].upper() + text[1:]
    return re.sub(r"(\d) (s|x|%)", "\\1\u00a0\\2", begun) + "."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _setting(results: Results, about: Circumstances) -> list[str]:
    facts = results.facts
    if not facts:
        return [f"<p>{escape(about.place)}.</p>"]
    seeds = len(results.of(results.sides[0]))
    words = (
        f"Model {facts['name']}, {facts['parameters'] / 1e6:.2f} million parameters, on {facts['source']}; "
        f"{results.seconds:g} s for each side, one after the other, {seeds} seed{'s' * (seeds > 1)}."
    )
    trouble = f"{about.place}. {about.description}"
    return [f"<p>{escape(words)}</p>", f'<p class="soft">{escape(trouble)}</p>']


def _sides(results: Results) -> str:
    goal = results.goal()
    figure = str(results.facts.get("figure", "accuracy"))
    reached = f"to {figure_text(goal, results.facts)}" if goal is not None else "time"
    names = ["", reached, f"{figure} at the end", "steps", "p50", "p99", "p99/p50"]
    rows = []
    for side in results.sides:
        runs = results.of(side)
        finals = [run.figures["figure"] for run in runs if "figure" in run.figures]
        time_s = None if goal is None else results.reached_s(side, goal)
        p50_s, p99_s = results.quantile_s(side, "p50_s"), results.quantile_s(side, "p99_s")
        cells = [
            NAMES[side],
            f"{time_s:.1f} s" if time_s is not None else "not reached",
            figure_text(sum(finals) / len(finals), results.facts) if finals else "–",
            f"{sum(run.figures['steps'] for run in runs) / len(runs):.0f}",
            f"{1e3 * p50_s:.0f} ms" if p50_s else "–",
            f"{1e3 * p99_s:.0f} ms" if p99_s else "–",
            f"{p99_s / p50_s:.1f}" if p50_s and p99_s else "–",
        ]
        rows.append(cells)
    return _table(names, rows)


def _failures(results: Results) -> list[str]:
    return [
        _warning(f"{NAMES[run.side]}, seed {run.seed}, stopped: {run.outcome.failed}")
        for run in results.runs
        if run.outcome.failed
    ]


def _warning(text: str) -> str:
    return f'<p class="warning">{escape(text)}</p>'


def _figure(chart: Chart) -> str:
    return (
        f'<figure id="{chart.name}" style="margin:0"><h2>{escape(chart.title)}</h2>'
        f'<p class="soft">{escape(chart.note)}</p>'
        f'<div class="wide">{draw(chart, WIDE)}</div><div class="narrow">{draw(chart, NARROW)}</div></figure>'
    )


def _tailcut(results: Results) -> list[str]:
    """Drift and the effective configuration, from the first seed."""
    done = [run.outcome.results for run in results.of(TAILCUT) if run.outcome.results]
    if not done:
        return []
    by_rank = done[0]
    drift = {f"worker {rank}": f"{result['stats']['drift']:.2g}" for rank, result in sorted(by_rank.items())}
    equal = len({result.get("parameters") for result in by_rank.values()}) == 1
    replicas = (
        "After before_checkpoint() all replicas are equal." if equal else "The replicas differ at the end."
    )
    if any("parameters" not in result for result in by_rank.values()):
        replicas = "Not all workers lived to compare their replicas."
    return [
        '<section id="traffic"><h2>Traffic of tailcut by worker</h2>',
        '<p class="soft">Late packets came after their stage had ended. A switch has cut trimmed ones.</p>',
        f"{_traffic(by_rank)}</section>",
        '<section id="drift"><h2>Drift between replicas</h2>',
        '<p class="soft">The distance of a replica from the others, over the norm of its parameters, as '
        f"estimated at the end. {replicas}</p>",
        f"{_facts(drift)}</section>",
        '<section id="configuration"><h2>Effective configuration of tailcut</h2><details><summary>'
        f"{len(by_rank[0]['config'])} fields</summary>{_facts(by_rank[0]['config'])}</details>",
        f'<p class="soft">{escape(by_rank[0]["stats_text"])}</p></section>',
    ]


def _traffic(by_rank: Mapping[int, Mapping[str, Any]]) -> str:
    names = ["worker", "MB sent", "MB received", "packets late", "trimmed", "sent again"]
    rows = []
    for rank, result in sorted(by_rank.items()):
        traffic = result["stats"]["traffic"]
        rows.append(
            [
                f"{rank}",
                *(f"{traffic[name] / 1e6:,.0f}" for name in ("sent_bytes", "received_bytes")),
                *(f"{traffic[name]:,}" for name in ("late_packets", "trimmed_packets", "resent_packets")),
            ]
        )
    return _table(names, rows)


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """On a phone each row is a list of its own, with the names beside the cells."""
    lines = []
    for row in rows:
        cells = (
            f'<td data-name="{escape(name)}">{escape(cell)}</td>'
            for name, cell in zip(names, row, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    return f'<table class="rows"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def _facts(facts: Mapping[str, Any]) -> str:
    rows = (
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>" for name, value in facts.items()
    )
    return f'<table class="facts"><tbody>{"".join(rows)}</tbody></table>'
