"""Judges the network between the ranks. Each check depends on the findings of all ranks."""

from __future__ import annotations

import math
import statistics

from tailcut.tools.doctor.check import Check, Setting
from tailcut.tools.doctor.findings import Findings, Op

FAIL_LOSS_FRAC = 0.05
"""With more loss, means visibly lack contributions where packets are not sent again."""
SLOW_PAIR = 10.0
SLOW_PAIR_S = 1e-3
"""A pair is slow if its median is above this and also many times that of all pairs."""
SLOW_PORT = 3.0
SLOW_PORT_S = 2e-3
"""A port is slow if what goes through it takes so many times longer than elsewhere, and so much longer."""
DEADLINE_MARGIN = 3.0
SHORTEST_DEADLINE_S = 0.01

ByRank = dict[int, Findings]


def judge(ranks: ByRank, world_size: int, deadline_s: float, bucket_bytes: int) -> list[Check]:
    checks = [reported(ranks, world_size)]
    if any(findings.pings for findings in ranks.values()):
        checks += [rtt(ranks), loss(ranks)]
    if ops := slowest_ops(ranks, world_size):
        checks += [allreduce(ops, bucket_bytes), deadline(ops, bucket_bytes, deadline_s)]
        checks += ports(ranks)
    return checks


def reported(ranks: ByRank, world_size: int) -> Check:
    silent = [rank for rank in range(world_size) if rank not in ranks]
    if not silent:
        return Check("ranks", "ok", f"all {world_size} reported")
    return Check(
        "ranks",
        "fail",
        f"ranks {silent} did not report to rank 0",
        "are they running, with the same store and world size? What they print says more",
    )


def rtt(ranks: ByRank) -> Check:
    medians = {
        (source, peer): ping.rtt_median_s
        for source, findings in ranks.items()
        for peer, ping in findings.pings.items()
        if ping.rtt_median_s is not None
    }
    if not medians:
        return Check("rtt", "fail", "no datagram was answered", "see reachability")
    typical_s = statistics.median(medians.values())
    slowest = max(medians, key=lambda pair: medians[pair])
    found = (
        f"median {1e3 * typical_s:.3f} ms; slowest pair {slowest[0]} to {slowest[1]} "
        f"with {1e3 * medians[slowest]:.3f} ms"
    )
    limit_s = max(SLOW_PAIR * typical_s, SLOW_PAIR_S)
    if medians[slowest] <= limit_s:
        return Check("rtt", "ok", found)
    by_rank = {rank: [s for pair, s in medians.items() if rank in pair] for rank in ranks}
    late = [rank for rank, times_s in by_rank.items() if min(times_s, default=0.0) > limit_s]
    if late and len(ranks) > 2:
        return Check("rtt", "warn", f"{found}; {_named(late)} late to everybody", "look at that host")
    return Check("rtt", "warn", found, "every op waits for its slowest pair: look at that path or that host")


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]} answers" if len(ranks) == 1 else f"ranks {ranks} answer"


def ports(ranks: ByRank) -> list[Check]:
    """Whether what one rank sends, or what is sent to it, takes clearly longer than among the others."""
    if len(ranks) < 3:
        return []
    took_s = {
        (source, rank): statistics.median(times_s)
        for rank, findings in ranks.items()
        for source in ranks
        if (times_s := _took_s(findings, source))
    }
    slow = []
    for rank in ranks:
        others_s = [s for pair, s in took_s.items() if rank not in pair]
        for way, end in (("from", 0), ("to", 1)):
            own_s = [s for pair, s in took_s.items() if pair[end] == rank]
            if own_s and others_s and _is_slow(statistics.median(own_s), statistics.median(others_s)):
                slow.append(
                    f"a contribution {way} rank {rank} takes {1e3 * statistics.median(own_s):.1f} ms, "
                    f"among the others {1e3 * statistics.median(others_s):.1f} ms"
                )
    if not slow:
        return [Check("ports", "ok", "none is clearly slower than the others")]
    remedy = "every op waits for that rank, or lacks it: look at its link, its port of the switch, its host"
    return [Check("ports", "warn", "; ".join(slow), remedy)]


def _took_s(findings: Findings, source: int) -> list[float]:
    """How long the contributions of another rank took to come to this one, by op."""
    times_s = (op.sources_s[source] for op in findings.ops if op.sources_s and source != findings.rank)
    return [time_s for time_s in times_s if time_s is not None]


def _is_slow(own_s: float, others_s: float) -> bool:
    return own_s > max(SLOW_PORT * others_s, others_s + SLOW_PORT_S)


def lost_frac(ranks: ByRank, source: int, peer: int) -> float | None:
    """The share of datagrams from one rank to another that was lost; None if none was sent.

    The receiver's count is about this direction alone. Without it, what was not answered counts as lost.
    """
    ping = ranks[source].pings.get(peer) if source in ranks else None
    if ping is None or not ping.sent:
        return None
    heard = ranks[peer].heard[source] if peer in ranks and ranks[peer].heard else ping.answered
    return (ping.sent - max(heard, ping.answered)) / ping.sent


def loss(ranks: ByRank) -> Check:
    """The loss of pairs whose receiver reported. Other checks tell about receivers that did not."""
    shares = {
        (source, peer): share
        for source, findings in ranks.items()
        for peer in findings.pings
        if peer in ranks and (share := lost_frac(ranks, source, peer)) is not None
    }
    if not shares:
        return Check("loss", "warn", "not measured", "see ranks")
    lossy = sorted((pair for pair in shares if shares[pair] > 0), key=lambda pair: -shares[pair])
    sent = sum(ping.sent for findings in ranks.values() for ping in findings.pings.values())
    if not lossy:
        return Check("loss", "ok", f"none of {sent} datagrams")
    worst = ", ".join(f"{a} to {b} {shares[a, b]:.1%}" for a, b in lossy[:4])
    return Check(
        "loss",
        "fail" if shares[lossy[0]] > FAIL_LOSS_FRAC else "warn",
        f"{len(lossy)} of {len(shares)} pairs lose datagrams at a gentle pace: {worst}",
        "look at these hosts' links, queues and receive buffers (ip -s link; nstat -az UdpRcvbufErrors)",
    )


def slowest_ops(ranks: ByRank, world_size: int) -> list[Op]:
    """The ops that all ranks did, each with the time of its slowest rank and the mean loss of its result."""
    if len(ranks) < world_size:
        return []
    together = zip(*(findings.ops for findings in ranks.values()), strict=False)
    return [
        Op(
            elapsed_s=max(op.elapsed_s for op in ops),
            complete=all(op.complete for op in ops),
            lost_frac=statistics.fmean(op.lost_frac for op in ops),
        )
        for ops in together
    ]


def allreduce(ops: list[Op], bucket_bytes: int) -> Check:
    median_s = statistics.median(op.elapsed_s for op in ops)
    lost = statistics.fmean(op.lost_frac for op in ops)
    cut = sum(not op.complete for op in ops)
    found = (
        f"{len(ops)} ops of {size(bucket_bytes)}: median {1e3 * median_s:.1f} ms, slowest "
        f"{1e3 * max(op.elapsed_s for op in ops):.1f} ms, {1 - lost:.2%} of the result delivered"
    )
    if not cut and not lost:
        return Check("allreduce", "ok", found)
    return Check(
        "allreduce",
        "fail" if lost > FAIL_LOSS_FRAC else "warn",
        f"{found}; {cut} ops did not complete",
        "mend the loss; on a slow link, try a smaller --bucket",
    )


def deadline(ops: list[Op], bucket_bytes: int, configured_s: float) -> Check:
    """A deadline is a multiple of the slowest complete op. Ops that were cut do not tell their time."""
    complete_s = [op.elapsed_s for op in ops if op.complete]
    if 2 * len(complete_s) < len(ops):
        found = (
            f"{configured_s:g} s; nothing to suggest, as only {len(complete_s)} of {len(ops)} ops completed"
        )
        return Check("deadline", "warn", found, "see allreduce")
    slowest_s = max(complete_s)
    suggested_s = round_up(max(DEADLINE_MARGIN * slowest_s, SHORTEST_DEADLINE_S))
    why = (
        f"{DEADLINE_MARGIN:g} x the slowest of {len(ops)} ops of {size(bucket_bytes)} "
        f"({1e3 * slowest_s:.1f} ms); add by how much your ranks' computing times differ"
    )
    setting = Setting("TAILCUT_DEADLINE_S", f"{suggested_s:g}", why)
    if configured_s < slowest_s:
        found = f"{configured_s:g} s is less than an op of {size(bucket_bytes)} takes: it would be cut"
        return Check("deadline", "warn", found, setting.command, (setting,))
    return Check("deadline", "ok", f"{configured_s:g} s is configured", settings=(setting,))


def round_up(seconds: float) -> float:
    """Round up to two digits."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return float(f"{math.ceil(seconds / unit - 1e-9) * unit:.2g}")


def size(count_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if count_bytes >= unit:
            return f"{count_bytes / unit:.4g} {name}"
    return f"{count_bytes} bytes"
