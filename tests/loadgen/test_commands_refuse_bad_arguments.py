"""What is wrong with a command line is one line on stderr, and the status says so."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import orjson
import pytest

from loadgen.cli import run
from loadgen.outcomes import OUTCOMES_FILE
from loadgen.report import PAGE_FILE, PICTURE_FILE
from loadgen.summary import SUMMARY_FILE
from tests.loadgen.fake_server import Received, fake_server, stream_answer

BAD_TRACE = "prompt_tokens,output_tokens\n1,2\n1,x\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "frobnicate"),
        (["replay", "--rate", "fast"], "--rate"),
        (["replay", "--rat", "1"], "--rat"),
        (["replay", "--rate", "1"], "never ends"),
        (["replay", "--requests", "1"], "--rate or --load"),
        (["replay", "--requests", "1", "--rate", "1", "--load", "1"], "not both"),
        (["replay", "--requests", "1", "--rate", "-1"], "must be positive"),
        (["replay", "--trace", "nowhere.csv", "--rate", "1"], "nowhere.csv"),
        (["replay", "--trace", "BAD", "--rate", "1"], "bad.csv:3: no whole number: 'x'"),
        (["replay", "--requests", "1", "--rate", "1", "--url", "127.0.0.1:9"], "http://"),
        (["experiments", "tabel-1"], "(did you mean 'table-1'?); there are: "),
        (["replay", "--requests", "1", "--rate", "1", "--arrivals", "tidal"], "tidal"),
        (["replay", "--requests", "1", "--rate", "1", "--prediction", "vague"], "prediction"),
        (["demo", "--policies", "psychic"], "psychic"),
        (["demo", "--profile", "abacus"], "abacus"),
        (["demo", "--workers", "0"], "workers"),
        (["report", "nowhere"], "nowhere"),
        (["bench", "light-load", "--rate", "x"], "--rate"),
    ],
)
def test_bad_arguments_are_one_clear_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text(BAD_TRACE)
    named = [argument.replace("BAD", "bad.csv") for argument in arguments]
    with pytest.raises(SystemExit) as stopped:
        run(named)
    written = capsys.readouterr()
    assert stopped.value.code == 2
    assert message in written.err
    assert written.err.count("\n") == 1
    assert written.out == ""


def test_a_server_that_is_not_there_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--url", "http://127.0.0.1:9", "--requests", "1", "--rate", "1"]
    with pytest.raises(SystemExit) as stopped:
        run(["replay", *arguments, "--out", str(tmp_path)])
    written = capsys.readouterr()
    assert stopped.value.code == 1
    assert written.err.startswith("bidgate-load: ")
    assert written.err.count("\n") == 1


async def test_replay_writes_its_files_and_report_makes_them_again(tmp_path: Path) -> None:
    async def answer(request: Received, writer: asyncio.StreamWriter) -> None:
        await stream_answer(writer, request.body["mock_decode_tokens"])

    async with fake_server(answer) as fake:
        arguments = ["--url", fake.url + "/v1/", "--trace", "fixed:4x3", "--requests", "5"]
        status = await command("replay", *arguments, "--rate", "100", "--out", str(tmp_path))
    assert status == 0
    written = (tmp_path / SUMMARY_FILE).read_bytes()
    policy = orjson.loads(written)["policies"]["router"]
    assert policy["entered"] == policy["completed"] == 5
    assert policy["output_tokens"] == 15
    assert len((tmp_path / OUTCOMES_FILE).read_text().splitlines()) == 5
    (tmp_path / PAGE_FILE).unlink()
    (tmp_path / PICTURE_FILE).unlink()
    assert await command("report", str(tmp_path)) == 0
    assert (tmp_path / SUMMARY_FILE).read_bytes() == written
    assert (tmp_path / PAGE_FILE).stat().st_size > 0
    assert (tmp_path / PICTURE_FILE).stat().st_size > 0


async def command(*arguments: str) -> int:
    """Run bidgate-load as a process of its own; returns its exit status."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", "from loadgen.cli import main; main()"),
        *arguments,
        stdout=asyncio.subprocess.DEVNULL,
    )
    return await process.wait()
