"""The options of ``tailcut ledger``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from tailcut import Ledger
from tailcut.tools.ledger.difference import differences
from tailcut.tools.ledger.export import FORMS, export
from tailcut.tools.ledger.prometheus import write_metrics
from tailcut.tools.ledger.show import one_op, screen
from tailcut.tools.ledger.summary import summarize
from tailcut.tools.ledger.tables import TABLES
from tailcut.tools.ledger.tensorboard import write_scalars
from tailcut.tools.ledger.trace import write_trace

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(commands: Commands) -> None:
    parser = commands.add_parser(
        "ledger",
        help="what a run cost, from its ledgers",
        description="Reads the ledgers that the ranks of a run have kept (Config.ledger, docs/ledger.md).",
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="the run on one screen, or one op of it")
    show.set_defaults(run=_show)
    show.add_argument("directory", type=Path)
    show.add_argument("--op", type=int, metavar="N", help="this op, as every rank saw it")
    _add_run(show)
    diff = actions.add_parser("diff", help="the first op at which two runs part, and what differs")
    diff.set_defaults(run=_diff)
    diff.add_argument("directory", type=Path)
    diff.add_argument("other", type=Path)
    table = actions.add_parser("export", help="tables for pandas, DuckDB and others")
    table.set_defaults(run=_export)
    table.add_argument("directory", type=Path)
    table.add_argument("--to", type=Path, required=True, metavar="DIRECTORY", help="where the files go")
    table.add_argument("--format", choices=FORMS, default="csv", help="default: csv")
    table.add_argument("--tables", nargs="+", choices=tuple(TABLES), default=tuple(TABLES), metavar="TABLE")
    _add_run(table)
    for name, (target, about, _) in _VIEWS.items():
        view = actions.add_parser(name, help=about)
        view.set_defaults(run=_view, view=name)
        view.add_argument("directory", type=Path)
        view.add_argument("--to", type=Path, required=True, metavar=target)
        view.add_argument(
            "--every", type=float, metavar="SECONDS", help="write it again so often, until Ctrl-C"
        )
        _add_run(view)
    dashboard = actions.add_parser("dashboard", help="print a Grafana dashboard for these metrics")
    dashboard.set_defaults(run=_dashboard)


_VIEWS: dict[str, tuple[str, str, Callable[[Ledger, Path], None]]] = {
    "trace": ("FILE", "spans for chrome://tracing and Perfetto, beside those of torch.profiler", write_trace),
    "prometheus": ("FILE", "metrics for the textfile collector of node-exporter", write_metrics),
    "tensorboard": ("DIRECTORY", "scalars for TensorBoard (pip install tailcut[tensorboard])", write_scalars),
}


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run", dest="which", metavar="NAME", help="of several runs there, this one (default: the latest)"
    )


def _show(arguments: argparse.Namespace) -> None:
    ledger = Ledger.open(arguments.directory, arguments.which)
    lines = screen(ledger, summarize(ledger)) if arguments.op is None else one_op(ledger, arguments.op)
    for line in lines:
        print(line)


def _diff(arguments: argparse.Namespace) -> int:
    """Like diff: 0 if the runs are alike, 1 if they are not."""
    lines = list(differences(Ledger.open(arguments.directory), Ledger.open(arguments.other)))
    print("\n".join(lines))
    return int(lines[0].startswith("the runs part"))


def _export(arguments: argparse.Namespace) -> None:
    ledger = Ledger.open(arguments.directory, arguments.which)
    for loss in ledger.losses():
        print(f"not on record: {loss}")
    for path in export(ledger, arguments.to, arguments.format, arguments.tables):
        print(path)


def _view(arguments: argparse.Namespace) -> None:
    _, _, write = _VIEWS[arguments.view]
    while True:
        write(Ledger.open(arguments.directory, arguments.which), arguments.to)
        if arguments.every is None:
            return
        time.sleep(arguments.every)


def _dashboard(arguments: argparse.Namespace) -> None:
    print((resources.files("tailcut.tools.ledger") / "grafana.json").read_text(), end="")
