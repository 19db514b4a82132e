"""Every test that docs/conformance.md names exists, and every row of its tables names one."""

from __future__ import annotations

import re

import pytest

from tests.deploy.commands import ROOT

PAGE = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")
FOLDERS = "service|control|mock|vllm|loadgen|chaos|fuzz|deploy"
FILE = rf"(?:{FOLDERS})/test_\w+\.py"
REFERENCE = re.compile(
    rf"(?P<link>\[)?({FILE})(?(link)\]\(\.\./tests/\2\))\s((?:`test_\w+`(?:, )?)+|\d+)"
)
ROWS = [
    line
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| feature |", "| fault |"))
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_row_names_a_test(row: str) -> None:
    assert REFERENCE.search(row.rsplit("|", 2)[1])


def test_every_named_test_exists() -> None:
    references = REFERENCE.findall(PAGE)
    assert len(references) > len(ROWS) // 2
    named = "".join(names for _, _, names in references)
    assert re.findall(r"`test_\w+`", named) == re.findall(r"`test_\w+`", PAGE)
    for _, file, names in references:
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        if names.isdigit():
            assert len(re.findall(r"^(?:async )?def test_", source, re.MULTILINE)) >= int(names)
            continue
        for name in re.findall(r"test_\w+", names):
            assert re.search(rf"^(?:async )?def {name}\(", source, re.MULTILINE), f"{file} {name}"
