"""`bidgate-load soak` ends with an error when its run found trouble, and says which."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadgen.chaos import ChaosReport
from loadgen.chaos_judge import End
from loadgen.chaos_keys import Key
from loadgen.chaos_plan import ChaosSpec
from loadgen.chaos_verdict import Books, read_page, troubles
from loadgen.cli import run
from loadgen.soak_command import SUMMARY

REQUESTS = 10
EMPTY = replace(read_page("# no series yet\n"), workers=2)
QUIET = replace(EMPTY, entered=REQUESTS, ended=REQUESTS, answered=REQUESTS)


def judged(ends: dict[End, int], after: Books, **found: Any) -> ChaosReport:
    """A report as a run hands it over, judged by the verdict of real runs."""
    counts = Counter({str(end): count for end, count in ends.items()})
    report = ChaosReport(
        requests=REQUESTS, proxied=REQUESTS, ends=counts, before=EMPTY, after=after, **found
    )
    report.troubles = troubles(report)
    return report


WELL = judged({End.COMPLETED: 8, End.LEFT: 2}, QUIET)
LOST: dict[str, tuple[ChaosReport, str]] = {
    "a request without an end": (judged({End.COMPLETED: 9}, QUIET), "9 of 10 requests ended"),
    "a hang": (judged({End.COMPLETED: 9, End.HUNG: 1}, QUIET), "1 requests never ended"),
    "a wrong answer": (judged({End.COMPLETED: 9, End.WRONG: 1}, QUIET), "1 answers were wrong"),
    "an ended request too few": (
        judged({End.COMPLETED: 10}, replace(QUIET, ended=9)),
        "10 requests entered, 9 ended",
    ),
    "something held": (judged({End.COMPLETED: 10}, replace(QUIET, running=1)), "still held"),
    "done twice": (judged({End.COMPLETED: 10}, QUIET, twice=1), "generated twice"),
    "left behind": (judged({End.COMPLETED: 10}, QUIET, left_at_workers=1), "left at workers"),
    "a place of a key": (judged({End.COMPLETED: 10}, replace(QUIET, keyed=1)), "still held"),
    "a prompt": (judged({End.COMPLETED: 10}, replace(QUIET, prefill_kv_tokens=16)), "still held"),
    "a limit not told": (
        judged({End.COMPLETED: 10}, replace(QUIET, limited=1)),
        "1 were over a key's limit, 0 were told so",
    ),
    "a limit nobody reached": (
        judged({End.COMPLETED: 9, End.LIMITED: 1}, QUIET),
        "0 were over a key's limit, 1 were told so",
    ),
    "a key not asked for": (
        judged({End.COMPLETED: 9, End.LOCKED_OUT: 1}, QUIET),
        "0 had no key, 1 were told so",
    ),
    "a limit that does not hold": (
        judged(
            {End.COMPLETED: 10}, QUIET, samples=[replace(QUIET, running_by_key={str(Key.FEW): 3})]
        ),
        "a key for 2 requests at once had 3",
    ),
    "a rate that does not hold": (
        judged(
            {End.COMPLETED: 10}, replace(QUIET, let_in_by_key={str(Key.SLOW): 9}), slow_most=8.0
        ),
        "a key for 8.0 requests in all had 9",
    ),
    "files that grow": (judged({End.COMPLETED: 10}, replace(QUIET, open_files=99)), "open files"),
}


def soak(report: ChaosReport, out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The command's status, where the run itself is one that found this."""

    async def found(_: ChaosSpec, __: Path) -> ChaosReport:
        return report

    monkeypatch.setattr("loadgen.chaos.run_chaos", found)
    with pytest.raises(SystemExit) as ended:
        run(["soak", "--duration-s", "2", "--out", str(out)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(("report", "trouble"), LOST.values(), ids=LOST.keys())
def test_trouble_fails_the_command_and_is_told(
    report: ChaosReport,
    trouble: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert soak(report, tmp_path, monkeypatch) == 1
    of_whole, of_pairs = orjson.loads((tmp_path / SUMMARY).read_bytes())["troubles"]
    assert of_whole.startswith("whole: ")
    assert of_pairs.startswith("pairs: ")
    assert trouble in of_whole
    assert trouble in of_pairs
    shown = " ".join(capsys.readouterr().out.split())
    assert trouble.split()[-1] in shown


def test_a_run_that_lost_nothing_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WELL.troubles == []
    assert soak(WELL, tmp_path, monkeypatch) == 0


def test_make_soak_ends_as_the_command_does() -> None:
    lines = Path("Makefile").read_text("utf-8").splitlines()
    (recipe,) = (line for line in lines if "bidgate-load soak" in line)
    # Nothing after the command, and no "-" before it, by which make would look over its status.
    assert recipe.startswith("\t@$(BIN)/bidgate-load soak")
    assert not {"|", ";", "||", "&&"} & set(recipe.split())
