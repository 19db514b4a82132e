"""The gate `.ci/run`: what makes it fail, what it counts, what it says when it skips."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.deploy.commands import ROOT

FAKE_MAKE = """\
#!/usr/bin/env bash
name=${1//-/_}
[ "${PYTEST_ADDOPTS:-}" = --last-failed ] && name+=_again
said=SAYS_$name status=ENDS_$name
cat
echo "${!said:-}"
exit "${!status:-0}"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A copy of the gate in which `make` says and answers what a test wants."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, **answers: str | int) -> subprocess.CompletedProcess[str]:
        """Run it: says_TARGET is what a target prints, ends_TARGET its exit status."""
        wanted = {"says_test": "3 passed in 0.10s"} | answers
        named = {
            re.sub("^(says|ends)", lambda found: found[0].upper(), key): str(value)
            for key, value in wanted.items()
        }
        return subprocess.run(
            [self.folder / ".ci" / "run"],
            env=self.environment | named,
            input="this must not reach a step",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """The gate without a way to real vLLM."""
    bin_folder = tmp_path / "bin"
    for folder in (bin_folder, tmp_path / ".ci", tmp_path / "scripts"):
        folder.mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    _script(bin_folder / "make", FAKE_MAKE)
    _script(
        tmp_path / "scripts" / "vllm-env", "#!/bin/sh\necho no wheel for this machine\nexit 1\n"
    )
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    return Gate(folder=tmp_path, environment={"PATH": path, "HOME": str(tmp_path)})


@pytest.fixture
def gate_with_vllm(gate: Gate) -> Gate:
    """The gate on a machine that can run real vLLM."""
    _script(gate.folder / "scripts" / "vllm-env", "#!/bin/sh\n")
    (gate.folder / ".venv" / "bin").mkdir(parents=True)
    _script(gate.folder / ".venv" / "bin" / "python", "#!/bin/sh\n")
    return gate


def _script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.splitlines()[-1]


def test_it_passes_and_counts_when_everything_passes(gate_with_vllm: Gate) -> None:
    done = gate_with_vllm.run(
        says_test="40 passed, 2 skipped, 7 deselected in 12.34s",
        says_test_vllm="5 passed, 1 warning in 61.00s (0:01:01)",
    )
    assert done.returncode == 0, done.stdout
    assert _last_line(done) == "tests: 45 passed, 0 failed, 2 skipped"


def test_a_failed_test_fails_it_and_lint_runs_all_the_same(gate: Gate) -> None:
    done = gate.run(
        says_test="1 failed, 2 passed, 1 error in 0.10s",
        ends_test=2,
        says_test_again="1 failed, 1 error, 2 deselected in 0.10s",
        ends_test_again=2,
        says_lint="lint ran",
    )
    assert done.returncode == 1
    assert "lint ran" in done.stdout
    assert _last_line(done) == "tests: 2 passed, 2 failed, 0 skipped"


def test_a_test_that_passes_alone_does_not_fail_it_and_is_told(gate: Gate) -> None:
    done = gate.run(
        says_test="1 failed, 2 passed in 0.10s",
        ends_test=2,
        says_test_again="1 passed, 2 deselected in 0.10s",
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^test +ok .*1 failed.*SECOND ATTEMPT.*1 passed", done.stdout, re.MULTILINE)
    assert _last_line(done) == "tests: 3 passed, 0 failed, 0 skipped"


def test_a_second_attempt_that_ends_without_a_word_fails_it(gate: Gate) -> None:
    done = gate.run(says_test="1 failed, 2 passed in 0.10s", ends_test=2, says_test_again="")
    assert done.returncode == 1
    assert _last_line(done) == "tests: 2 passed, 1 failed, 0 skipped"


def test_a_lint_finding_fails_it(gate: Gate) -> None:
    done = gate.run(ends_lint=2)
    assert done.returncode == 1
    assert re.search(r"^lint +FAILED", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        pytest.param("no tests ran in 0.01s", 2, id="pytest found none: its status 5"),
        pytest.param("4 skipped in 0.01s", 0, id="all were skipped"),
        pytest.param("", 0, id="pytest did not run at all"),
    ],
)
def test_a_run_without_a_test_fails_it(gate: Gate, said: str, status: int) -> None:
    done = gate.run(says_test=said, ends_test=status)
    assert done.returncode == 1
    assert "no test was executed" in done.stdout


def test_nothing_else_runs_when_the_environment_cannot_be_made(gate: Gate) -> None:
    done = gate.run(ends_setup=1)
    assert done.returncode == 1
    assert "== test" not in done.stdout


def test_it_says_loudly_why_real_vllm_was_not_tested(gate: Gate) -> None:
    done = gate.run()
    assert done.returncode == 0, done.stdout
    assert "!! REAL vLLM NOT TESTED: no wheel for this machine" in done.stdout
    assert re.search(r"^test-vllm +SKIPPED +no wheel", done.stdout, re.MULTILINE)


def test_a_skip_of_real_vllm_fails_it_where_it_is_required(gate: Gate) -> None:
    gate.environment["CI_VLLM"] = "required"
    assert gate.run().returncode == 1


def test_a_failure_against_real_vllm_fails_it(gate_with_vllm: Gate) -> None:
    done = gate_with_vllm.run(
        says_test_vllm="1 failed, 4 passed in 60.00s",
        ends_test_vllm=2,
        says_test_vllm_again="1 failed, 4 deselected in 9.00s",
        ends_test_vllm_again=2,
    )
    assert done.returncode == 1
    assert _last_line(done) == "tests: 7 passed, 1 failed, 0 skipped"


def test_no_step_reads_the_callers_standard_input(gate: Gate) -> None:
    assert "this must not reach a step" not in gate.run().stdout


def test_the_workflow_runs_the_same_gate() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    commands = [step.get("run") for step in jobs["gate"]["steps"]]
    assert ".ci/run" in commands
    assert jobs["gate"]["timeout-minutes"] >= 60


def test_make_help_names_every_target() -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (targets,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert {line.split()[1] for line in shown.splitlines()} == set(targets.split())
