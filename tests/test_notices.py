"""What the user is told: where a warning points, and when a line goes to the log."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tailcut import FileStore, Group, notices

LOG = logging.getLogger("tailcut.test")


@contextlib.contextmanager
def no_handlers(level: int = logging.NOTSET) -> Iterator[None]:
    """As in a script that has not configured logging; pytest configures it in every phase of a test."""
    with mock.patch.object(logging.root, "handlers", []):
        logging.getLogger("tailcut").setLevel(level)
        try:
            yield
        finally:
            logging.getLogger("tailcut").setLevel(logging.NOTSET)


def test_a_line_is_seen_where_no_logging_is_configured(capsys: pytest.CaptureFixture[str]) -> None:
    with no_handlers():
        notices.say(LOG, "tailcut: this and that")
    assert capsys.readouterr().err == "tailcut: this and that\n"


def test_a_line_goes_to_the_users_logging_and_only_there(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "tailcut"):
        notices.say(LOG, "tailcut: this and that")
    assert caplog.record_tuples == [("tailcut.test", logging.INFO, "tailcut: this and that")]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("level", "heard"), [(logging.DEBUG, 1), (logging.INFO, 1), (logging.WARNING, 0)])
def test_a_level_holds_without_a_handler_too(
    capsys: pytest.CaptureFixture[str], level: int, heard: int
) -> None:
    with no_handlers(level):
        notices.say(LOG, "line")
    assert capsys.readouterr().err.count("line") == heard


def test_disabled_logging_is_silence(capsys: pytest.CaptureFixture[str]) -> None:
    logging.disable(logging.INFO)
    try:
        with no_handlers():
            notices.say(LOG, "line")
    finally:
        logging.disable(logging.NOTSET)
    assert capsys.readouterr().err == ""


def line_of(text: str) -> int:
    """The only line of this file that ends so."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = (number for number, line in enumerate(lines, 1) if line.endswith(text))
    return found


def run(thread: threading.Thread) -> None:
    thread.start()
    thread.join()


@pytest.mark.parametrize("how", ["wait", "done"])
def test_an_alarm_points_at_the_line_that_waits(tmp_path: Path, how: str) -> None:
    with Group(0, 1, FileStore(tmp_path)) as group:
        work = group.allreduce(np.zeros(10, np.float32))
        group._steering._row._alarms.append("tailcut: a rank is dropped")
        with pytest.warns(RuntimeWarning, match="a rank is dropped") as caught:
            getattr(work, how)()  # here
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, line_of("# " + "here"))


def test_from_a_thread_of_the_package_a_warning_points_at_the_line_that_began_it() -> None:
    place = notices.users_place()  # began
    thread = threading.Thread(target=notices.warn, args=("late", place))
    with pytest.warns(RuntimeWarning, match="late") as caught:
        run(thread)
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, line_of("# " + "began"))
