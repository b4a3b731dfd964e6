"""What no scheduler could pass on a run's profile and traffic: a bound beside each figure that misses its target.

    python scripts/scheduling_bounds.py results/scheduling-tight --arm all --arm wfq+tenant

All bounds are for the work that the arm did (or was offered), by the profile's own step times. They are
bounds under the assumptions said with each, not promises that something reaches them.

Short TTFT p99. Work that was done back to back fixes the mean step: with R output and P prefill tokens a second there
are R L decodes and P L prefill tokens in a step of L seconds, so no order of the same work changes L. A request that
comes waits for the rest of the step under way (a part of L, uniform), for the next one (L: it is scheduled
already where scheduling is asynchronous) and for its own: the decodes of a mean step, and its own uncached tokens
at what they add. Assumes that all steps are equally long, that nobody waits for a seat or for blocks, and that all other
prefill steps aside in its own step. Serving less would make it smaller. With bursts: short ones that come while another
one's tokens are computed wait for these or make it wait, one server for all of them, in the best order; the decodes
count once for a burst. In each stretch in which that server is never idle the fewest that must be late for a limit follow
from Moore's rule, as if all were there from its start.

Jain. In each 5 s window that counts, what was decoded is left as it was; the prefill tokens of the
backlogged tenants are dealt out anew so that service over weight is as equal as it can be (water filling).
Divided: a prompt can be prefilled in any number of parts at no cost, in blocks or in time. Whole: what was
computed of a prompt with 2,048 uncached tokens or more in the window goes to one tenant, whichever makes it most equal,
and only the rest is divided: as many documents at a time as there were, each window by itself and in hindsight.
Share: an equal share of the same service, tokens a second for each unit of weight. A tenant that is held to it in every
window needs a prompt's uncached length over its share for the prefill alone, so a prompt longer than share times
promise cannot be both fair in each window and in time.

Share. A tenant's offered tokens a second against its max-min share by weight of the service that all got.
Above 1 its own line grows: who comes at second t of the phase waits for `(ratio - 1) t`. Assumes that the phase
begins with no line.

Goodput. Requests are taken cheapest first, each at the least it can cost: its uncached prompt in full
steps without decodes, and for each output token its part of a step of as many decodes as seats and memory
allow; and again by memory, blocks times the time of its output at one decode a step. The less of the two. Assumes
that a request that is in time needs nothing beyond that, and that the cache hits as often as in the run.

Waits. The uncached prefill that the arm did by each moment, in the time in which it did it, and any order of the same
requests: by Moore's rule the fewest that must be beyond a limit, and so the least limit that 99% of the phase's can keep.
All others get their first token when they did. Once with the promises that the arm kept still kept (those
in time stay in time), and once without any. Where more comes than is served somebody waits for the whole line, and whoever
is served in time beside it makes that longer. For E2E what passed after the first token is left as it was.

Seats. Each tenant of the tier by itself, first come, first served, on its share of the seats by weight, and on what would
be its max-min share if it always wanted more and the others what they used on the mean; each request for as
long as it held its seat in the run, and then its prefill as it was. So it is what a tenant's own bursts cost it as
long as nobody gives up more of a share than is lent.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness.errors import UserError, told  # noqa: E402
from harness.plan import RunPlan, read  # noqa: E402
from scripts.bounds.figures import goodput_rps, jain, over_their_share, short_ttft_ms  # noqa: E402
from scripts.bounds.records import Machine, Seed, check_whole, load  # noqa: E402
from scripts.bounds.seats import seat_wait_ms  # noqa: E402
from scripts.bounds.waits import Wait, wait_ms  # noqa: E402

PHASES = (1, 2, 3, 4, 5)


def table_of(title: str, machine: Machine, seeds: list[Seed]) -> Table:
    """Latency of the short, fairness and goodput, and what bounds them; a row a phase."""
    table = Table(title=f"{title}: found, and what bounds it")
    for column in (
        "phase",
        "short TTFT p99 ms",
        "at least",
        "with bursts",
        "Jain",
        "whole, at most",
        "divided",
        "share tok/s",
        "goodput req/s",
        "at most",
        "work over its share",
    ):
        table.add_column(column, justify="right")
    for phase in PHASES:
        ttft = short_ttft_ms(machine, seeds, phase)
        fair = jain(seeds, phase)
        served, most, which = goodput_rps(machine, seeds, phase)
        over = ", ".join(f"{name} {ratio:.2f}" for name, ratio in over_their_share(seeds, phase).items())
        table.add_row(
            str(phase),
            *(f"{value:.0f}" for value in (ttft.found, ttft.alone, ttft.bursts)),
            *((f"{v:.3f}" for v in (fair.found, fair.whole, fair.divided)) if fair else ("-",) * 3),
            f"{fair.share_per_s:.0f}" if fair else "-",
            f"{served:.2f}",
            f"{most:.2f} ({which})",
            over,
        )
    return table


def waits_of(title: str, machine: Machine, seeds: list[Seed]) -> Table:
    """Tails of waits in the phases that load the machine; seconds."""
    table = Table(title=f"{title}: waits, p99 in seconds: found, with its promises kept, in any order")
    for column in (
        "phase",
        "TTFT of all",
        "in time",
        "bronze E2E",
        "in time",
        "silver TTFT: found, own seats, lent",
    ):
        table.add_column(column, justify="right")
    for phase in (3, 4, 5):
        cells = [str(phase)]
        for metric, tier in (("ttft_ms", ""), ("e2e_ms", "bronze")):
            cells += _cells(wait_ms(seeds, phase, metric, tier))
        seat = seat_wait_ms(machine, seeds, phase, "silver")
        cells.append(_seconds(seat.found, seat.own, seat.lent) if seat else "-")
        table.add_row(*cells)
    return table


def _cells(wait: Wait | None) -> list[str]:
    if wait is None:
        return ["-", "-"]
    return [_seconds(wait.found, wait.promised, wait.any_order), f"{wait.kept_share:.2f}"]


def _seconds(*values_ms: float) -> str:
    return ", ".join(f"{ms / 1e3:.1f}" if ms >= 1e4 else f"{ms / 1e3:.2f}" for ms in values_ms)


def main() -> None:
    """Print the bounds of a run's arms."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a virtual run of the five phases")
    parser.add_argument("--arm", action="append", help="may be repeated; default: all arms")
    args = parser.parse_args()
    with told("scheduling_bounds"):
        plan: RunPlan = read(args.run, same_code=False)
        check_whole(args.run, plan.workload)
        arms = [arm.name for arm in plan.arms]
        for name in args.arm or arms:
            if name not in arms:
                raise UserError(f"the run has no arm {name}; it has {', '.join(arms)}")
            seeds, title = load(args.run, name), f"{args.run.name}, {name}"
            console = Console(width=150)
            machine = Machine(plan, name)
            console.print(table_of(title, machine, seeds))
            console.print(waits_of(title, machine, seeds))


if __name__ == "__main__":
    main()
