"""How do tails grow with the number of ranks? P99 of tailcut and of a ring in the same simulated network.

Everything is in virtual time: figures are the same on every machine. Draws the picture of docs/simulation.md.
With all numbers of ranks it takes about half an hour; --ranks and --ops make it shorter.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

from tailcut.tools.cli.sizes import size_bytes
from tailcut.tools.sim import Options, Row, plot, run
from tailcut.tools.testbed import load_scenario

PICTURE = Path(__file__).parent.parent / "docs" / "scale.svg"
RANKS = "8,16,32,64,128,256,512,1024"


WARM_UP = 25
"""Ops until paths know their rates and bounds have been learned."""


def ops_for(ranks: int) -> int:
    """Fewer ops for more ranks, each of which gives a time; enough after the warm-up that P99 meets
    bursts."""
    return WARM_UP + min(200, 12_800 // ranks)


def measure(arguments: argparse.Namespace, ranks: int) -> Row:
    ops = arguments.ops or ops_for(ranks)
    options = Options(
        scenario=load_scenario(arguments.scenario),
        ranks=(ranks,),
        size_bytes=arguments.size,
        ops=ops,
        warmup=min(WARM_UP, ops - 1),
        mtu_bytes=9000,
        rate_bytes_per_s=arguments.rate * 1e9 / 8,
        against=("ring",),
        seed=arguments.seed,
        receive_buffer_bytes=arguments.receive_buffer,
    )
    (row,) = run(options)
    return row


def draw(rows: list[Row], arguments: argparse.Namespace, path: Path) -> None:
    figure, axes = plot.new_axes()
    ranks = [row.ranks for row in rows]
    for name, color in (("tailcut", "C0"), ("ring", "C1")):
        for q, style in ((50, ":"), (99, "-")):
            times_ms = [1e3 * row.sides[name].percentile_s(q) for row in rows]
            axes.plot(ranks, times_ms, style, color=color, marker="o", label=f"{name}, P{q}")
    axes.plot(
        ranks, [1e3 * row.sides["ring"].bound_s for row in rows], "--", color="0.5", label="least possible"
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="ranks",
        ylabel="completion time of an op at a rank (ms)",
        title=f"{arguments.scenario}, {arguments.size / 1e6:.4g} MB, {arguments.rate:g} Gbit/s, MTU 9000",
    )
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    plot.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", default="tail-3")
    parser.add_argument("--ranks", default=RANKS, metavar="N[,N...]")
    parser.add_argument("--ops", type=int, metavar="N", help="for all ranks (default: fewer for more)")
    parser.add_argument("--size", type=size_bytes, default=8 << 20, metavar="SIZE")
    parser.add_argument("--rate", type=float, default=1.0, metavar="GBIT/S")
    parser.add_argument("--receive-buffer", type=size_bytes, default=64 << 20, metavar="SIZE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, default=PICTURE, metavar="FILE")
    arguments = parser.parse_args()
    plot.check(arguments.plot)
    columns = ("tailcut P50", "P99", "lost (%)", "ring P50", "P99", "ring/tailcut P99", "CPU (s)", "RSS (MB)")
    print(f"{'ranks':>6}{'ops':>6}" + "".join(f"{column:>18}" for column in columns))
    rows = []
    for ranks in map(int, arguments.ranks.split(",")):
        start_s = time.process_time()
        row = measure(arguments, ranks)
        own, ring = row.sides["tailcut"], row.sides["ring"]
        cells = [
            *(f"{1e3 * own.percentile_s(q):.3f} ms" for q in (50, 99)),
            f"{100 * (1 - own.delivered):.3g}",
            *(f"{1e3 * ring.percentile_s(q):.3f} ms" for q in (50, 99)),
            f"{ring.percentile_s(99) / own.percentile_s(99):.2f}",
            f"{time.process_time() - start_s:.0f}",
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}",
        ]
        ops = arguments.ops or ops_for(ranks)
        print(f"{ranks:>6}{ops:>6}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
        rows.append(row)
    draw(rows, arguments, arguments.plot)
    print(f"wrote {arguments.plot}")


if __name__ == "__main__":
    main()
