"""`bidgate-load experiments`: the flags. What they start is in execution.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

DEFAULT_OUT = Path("out/experiments")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentOptions:
    """Flags of the experiments.

    Attributes:
        full: whole grids, longer runs and more seeds instead of the reduced ones.
        jobs: processes at once.
        seeds: simulations of every setting, seeds 1 to this; 2, or 5 with --full.
        requests: requests in one simulation; 400, or 3,400 with --full.
        data: folder with recorded traces (azure2023_conv.csv.gz and others); what is not there is
            skipped and said so.
        docs: folder that gets JSON, pictures and Markdown pages too (docs/results).
        render_only: simulate nothing; make pictures and pages again from the JSON in --out.
        recompute: simulate everything anew. Otherwise simulations that --out has from an earlier
            run, with the same code and the same settings, are used again.
    """

    full: bool = False
    jobs: int = 2
    seeds: int | None = None
    requests: int | None = None
    data: Path | None = None
    docs: Path | None = None
    render_only: bool = False
    recompute: bool = False


def experiments(
    *names: str, out: Path = DEFAULT_OUT, options: ExperimentOptions | None = None
) -> int:
    """Run experiments in virtual time and write what they say; all of them when none is named.

    Parameters
    ----------
    names
        Experiments to run.
    out
        Directory for NAME.json, NAME.md, pictures, README.md and experiments.html.
    """
    # Loaded here, so that other commands start without the simulator.
    from loadgen.experiments.execution import execute

    return execute(names, out, options or ExperimentOptions())
