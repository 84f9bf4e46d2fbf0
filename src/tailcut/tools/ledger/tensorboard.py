"""A run as scalars of TensorBoard, a run of its own for each rank, by op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tailcut import ConfigError, Ledger, Report


def write_scalars(ledger: Ledger, directory: Path) -> None:
    """Event files in a subdirectory for each rank."""
    writer_of = _writer()
    for rank in ledger.ranks.values():
        about = rank.start.about
        to_unix_s = about["started_unix_s"] - about["started_s"]
        writer = writer_of(directory / f"rank{rank.rank}")
        for record in rank.ops:
            at_s = record.entered_s + record.report.elapsed_s + to_unix_s
            for name, value in scalars(record.report).items():
                writer.add_scalar(f"tailcut/{name}", value, global_step=record.seq, walltime=at_s)
        writer.close()


def scalars(report: Report) -> dict[str, float]:
    """What is drawn of an op."""
    return {
        "elapsed_ms": 1e3 * report.elapsed_s,
        "lost_frac": report.lost_frac,
        "carried_coords": float(report.carried_coords),
        "trimmed_packets": float(report.traffic.trimmed_packets),
        "planes": float(report.scatter.planes),
        "epsilon/total": report.epsilon.total,
        **{f"epsilon/{source}": value for source, value in report.epsilon._asdict().items()},
    }


def _writer() -> Any:
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise ConfigError("scalars need TensorBoard: pip install tailcut[tensorboard]") from None

    class Writer:
        def __init__(self, directory: Path) -> None:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = EventFileWriter(str(directory))

        def add_scalar(self, name: str, value: float, global_step: int, walltime: float) -> None:
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            self._file.add_event(Event(step=global_step, wall_time=walltime, summary=summary))

        def close(self) -> None:
            self._file.close()

    return Writer
