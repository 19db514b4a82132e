"""The command `bidgate-load`: demo, replay, simulate, experiments, report, soak, bench.

Whatever is wrong with the flags or a file is one line on stderr and exit status 2; what cannot be
started or reached is one line and status 1; Ctrl-C is status 130. Commands load what they need
when they are called, so that mistakes are answered at once.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import cyclopts
import httpx
from cyclopts import App
from rich.console import Console

from loadgen.bench_commands import every_bench, light_load
from loadgen.bench_lengths import lengths
from loadgen.bench_rate import rate
from loadgen.bench_scrapes import scrapes
from loadgen.demo_command import demo
from loadgen.experiments.command import experiments
from loadgen.processes import ClusterError
from loadgen.proxy_command import proxy
from loadgen.replay_command import replay
from loadgen.side_by_side_command import vllm
from loadgen.simulate_command import simulate
from loadgen.soak_command import soak
from loadgen.tick_command import tick

WRONG_USE = 2
COULD_NOT = 1
INTERRUPTED = 130


def make_app() -> App:
    """Build the command line."""
    app = App(
        name="bidgate-load",
        version=version("bidgate"),
        help="Load generator, simulator, experiments and benchmarks for bidgate.",
        suppress_keyboard_interrupt=False,
    )
    app.command(demo)
    app.command(replay)
    app.command(simulate)
    app.command(experiments)
    app.command(report)
    app.command(soak)
    bench = App(name="bench", help="Measure the router itself, and beside others.")
    bench.command(light_load)
    bench.command(tick)
    bench.command(rate)
    bench.command(lengths)
    bench.command(scrapes)
    bench.command(every_bench, name="all")
    bench.command(proxy)
    bench.command(vllm)
    app.command(bench)
    return app


def report(directory: Path, /) -> None:
    """Make summary.json, comparison.png and report.html again from outcomes.jsonl.

    Parameters
    ----------
    directory
        Where outcomes.jsonl is; summary.json there, if any, gives command and setting.
    """
    from loadgen.report import rebuild, tell

    tell(rebuild(directory), "", directory, Console())


def main() -> None:
    """Run the command line of this process."""
    run(sys.argv[1:])


def run(arguments: list[str]) -> None:
    """Run one command line; exits with a status other than 0 when something is wrong."""
    try:
        make_app()(arguments, exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        _stop(str(error), WRONG_USE)
    except ValueError as error:
        _stop(str(error), WRONG_USE)
    except (ClusterError, httpx.HTTPError, OSError) as error:
        _stop(str(error) or type(error).__name__, COULD_NOT)
    except KeyboardInterrupt:
        _stop("interrupted; everything it started was stopped", INTERRUPTED)


def _stop(message: str, status: int) -> NoReturn:
    print(f"bidgate-load: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
