"""The last line of a demo: who reached the figure when, whichever way it went."""

from __future__ import annotations

from tailcut.tools.demo.results import NAMES, TAILCUT, Results

SAME = 0.03
"""Times that differ by no more than this share are called the same."""


def figure_text(figure: float, facts: dict[str, object]) -> str:
    return f"{100 * figure:.1f} %" if facts.get("figure") == "accuracy" else f"{figure:.3f}"


def verdict(results: Results) -> str:
    goal = results.goal()
    if goal is None:
        return f"no verdict: {'; '.join(_stopped(side, results) or _unseen(side) for side in results.sides)}"
    facts = results.facts
    figure = figure_text(goal, facts)
    if facts["figure"] != "accuracy":
        figure = f"a {facts['figure']} of {figure}"
    times_s = {side: results.reached_s(side, goal) for side in results.sides}
    own_s = times_s.pop(TAILCUT, None)
    clauses = [_clause(side, time_s, own_s, results) for side, time_s in times_s.items()]
    # Whoever was fastest is named first.
    order = sorted(
        zip(times_s.values(), clauses, strict=True), key=lambda pair: (pair[0] is None, pair[0] or 0)
    )
    rivals = ", ".join(clause for _, clause in order)
    if own_s is None:
        missed = _stopped(TAILCUT, results) or f"tailcut did not within {results.seconds:g} s"
        return f"{figure}: {missed}, {rivals}"
    later = _stopped(TAILCUT, results)
    return f"tailcut reached {figure} after {own_s:.1f} s, {rivals}" + (f"; then {later}" if later else "")


def _clause(side: str, time_s: float | None, own_s: float | None, results: Results) -> str:
    stopped = _stopped(side, results)
    if time_s is None:
        at_least = f" (more than {results.seconds / own_s:.1f} x)" if own_s else ""
        return stopped or f"{NAMES[side]} not within {results.seconds:g} s{at_least}"
    text = f"{NAMES[side]} after {time_s:.1f} s"
    if own_s:
        text += f" ({_ratio(time_s / own_s)})"
    return f"{text}, then {stopped}" if stopped else text


def _ratio(ratio: float) -> str:
    """How much longer the rival took than tailcut."""
    if abs(ratio - 1) <= SAME:
        return "the same"
    return (
        f"{ratio:.1f} x"
        if ratio >= 1.05
        else f"{ratio:.2f} x: tailcut was slower"
        if ratio < 1
        else f"{ratio:.2f} x"
    )


def _stopped(side: str, results: Results) -> str | None:
    failures = results.failures(side)
    if not failures:
        return None
    runs = len(results.of(side))
    often = f" in {len(failures)} of {runs} runs" if runs > 1 else ""
    return f"{NAMES[side]} stopped{often} ({failures[0]})"


def _unseen(side: str) -> str:
    return f"{NAMES[side]} has too few evaluations"
