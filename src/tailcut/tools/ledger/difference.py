"""Where two runs part: the first op whose record differs in what decides results, and what differs there."""

from __future__ import annotations

from collections.abc import Iterator

from tailcut import ConfigError, Fates, Ledger, OpRecord

_SETTINGS = ("ranks", "rows", "codec", "packet_bytes", "tailcut", "machine", "numpy")


def differences(a: Ledger, b: Ledger) -> Iterator[str]:
    """In words, line by line. The first line says whether the runs part."""
    settings = list(_settings(a, b))
    common = sorted(set(a.ranks) & set(b.ranks))
    if not common:
        raise ConfigError("the two ledgers have no rank in common")
    seqs = sorted(set.union(*(set(ledger.ranks[rank].by_seq) for ledger in (a, b) for rank in common)))
    for seq in seqs:
        found = [
            line
            for rank in common
            for line in _op(rank, a.ranks[rank].by_seq.get(seq), b.ranks[rank].by_seq.get(seq))
        ]
        if found:
            yield f"the runs part at op {seq}"
            yield from found
            break
    else:
        yield f"the runs are alike in all {len(seqs)} ops"
    yield from settings


def _settings(a: Ledger, b: Ledger) -> Iterator[str]:
    for name in _SETTINGS:
        if a.about[name] != b.about[name]:
            yield f"{name}: {a.about[name]} and {b.about[name]}"
    was, now = a.about["config"], b.about["config"]
    for name in sorted({*was, *now} - {"ledger"}):
        if was.get(name) != now.get(name):
            yield f"Config.{name}: {was.get(name)!r} and {now.get(name)!r}"


def _op(rank: int, a: OpRecord | None, b: OpRecord | None) -> Iterator[str]:
    if a is None or b is None:
        yield f"rank {rank}: only the {'first' if b is None else 'second'} run has the op on record"
        return
    for name, was, now in _decisive(a, b):
        if was != now:
            yield f"rank {rank}: {name} {was} and {now}"
    fates_alike = True
    for name in ("contributions", "answered", "empty", "cuts", "uses", "stood_in"):
        if getattr(a.fates, name) != getattr(b.fates, name):
            fates_alike = False
            yield f"rank {rank}: {_WORDS[name]} differ{_where(name, a.fates, b.fates)}"
    if fates_alike and a.fates.mean_hash != b.fates.mean_hash:
        yield (
            f"rank {rank}: all fates are alike and the result is not: the gradients differ (data order, "
            "seeds, library versions or hardware)"
        )


def _decisive(a: OpRecord, b: OpRecord) -> Iterator[tuple[str, object, object]]:
    yield "bucket", a.key, b.key
    yield "coordinates", a.report.length, b.report.length
    yield "status", a.report.status, b.report.status
    yield "epoch", a.report.epoch, b.report.epoch
    yield "contributed", a.report.contributed, b.report.contributed
    yield "planes", a.report.scatter.planes, b.report.scatter.planes
    yield "planes of the mean", a.report.gather.planes, b.report.gather.planes
    yield "an Inf or a NaN", a.report.non_finite, b.report.non_finite


_WORDS = {
    "contributions": "contributions that were in time",
    "answered": "means that came in time",
    "empty": "means that came EMPTY",
    "cuts": "trimmed packets",
    "uses": "late parts that were taken in",
    "stood_in": "stand-ins",
}


def _where(name: str, a: Fates, b: Fates) -> str:
    if name not in ("contributions", "answered", "empty"):
        return ""
    kind = "rank" if name == "contributions" else "shard"
    places = [
        str(place)
        for place, (was, now) in enumerate(zip(getattr(a, name), getattr(b, name), strict=False))
        if was != now
    ]
    return f" ({kind} {', '.join(places)})"
