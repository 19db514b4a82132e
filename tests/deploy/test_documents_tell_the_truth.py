"""README and docs: commands, links, routes, codes and headers in them exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from loadgen.cli import make_app as make_load_app
from service import hints
from service.app import assemble
from service.control.config import PolicyName
from service.errors import REFUSAL_ANSWERS, BidgateError
from service.settings import Settings
from service.surface import LIGHT, OPERATORS, QUEUED, STORED_PREFIX
from tests.deploy.commands import ROOT, parse_command

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
FENCED = re.compile(r"^```(?:sh)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
ROUTERS, LOADS = ("bidgate", ".venv/bin/bidgate"), ("bidgate-load", ".venv/bin/bidgate-load")
PLACES = {
    "URL": "http://127.0.0.1:8001",
    **dict.fromkeys(("N", "L", "S"), "4"),
    "FILE": str(ROOT / "deploy/settings.yaml"),
    "P": "online_lp",
    "NAME...": "table-1",
}
"""What stands in the documents for whatever a reader fills in."""
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)[^)]*\)")


def _commands(document: Path, *names: str) -> list[list[str]]:
    """Arguments of every command line in the document's shell blocks and inline code."""
    page = document.read_text(encoding="utf-8")
    blocks = (block.replace("\\\n", " ") for block in FENCED.findall(page))
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    lines += [" ".join(code.split()) for code in INLINE.findall(FENCED.sub("", page))]
    # Python code among them is no command line and may not split as one.
    called = [line for line in lines if line.startswith(tuple(f"{name} " for name in names))]
    return [
        [PLACES.get(argument, argument) for argument in shlex.split(line, comments=True)[1:]]
        for line in called
    ]


def _commands_of_all(*names: str) -> list[list[str]]:
    """Each once; a router's name before a policy's is no command."""
    found = (one for document in DOCUMENTS for one in _commands(document, *names))
    each = {shlex.join(one): one for one in found if one[0] not in set(PolicyName)}
    return list(each.values())


@pytest.mark.parametrize("arguments", _commands_of_all(*ROUTERS), ids=shlex.join)
def test_a_command_of_the_router_in_the_documents_parses(arguments: list[str]) -> None:
    parse_command(arguments)


@pytest.mark.parametrize("arguments", _commands_of_all(*LOADS), ids=shlex.join)
def test_a_command_of_the_load_generator_in_the_documents_parses(arguments: list[str]) -> None:
    make_load_app().parse_args(arguments, exit_on_error=False, print_error=False)


def test_targets_of_make_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {arguments[0] for arguments in _commands(ROOT / "README.md", "make") if arguments}
    assert {"demo", "test", "setup"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_files_lead_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_modules_in_the_architecture_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    modules = {
        path.relative_to(ROOT / "service").as_posix() for path in ROOT.glob("service/**/*.py")
    }
    named = set(re.findall(r"[\w/]+\.py", page))
    assert len(named) > 40
    assert {
        name
        for name in named
        if not any(one.endswith(f"/{name}") or one == name for one in modules)
    } == set()


def test_the_readme_lists_exactly_the_routes_that_are_served() -> None:
    app = assemble(Settings(workers=("http://127.0.0.1:9",))).app
    # What has a tag is a worker's or the operator's; docs/http.md and operations.md have these.
    own = {
        path
        for path, item in app.openapi()["paths"].items()
        if not any(operation.get("tags") for operation in item.values())
    }
    served = {path.replace("{name}", "ID") for path in own} | set(QUEUED)
    table = README.partition("| route |")[2].partition("\n\n")[0]
    told = set(re.findall(r"`(?:GET|POST) ([^`]+)`", table))
    # The light routes are a long list; docs/http.md has all of them.
    assert served <= told
    assert {path for path in told - served if path not in LIGHT} <= {f"{STORED_PREFIX}ID"}


def test_the_http_page_names_every_route_that_goes_to_workers() -> None:
    page = (ROOT / "docs/http.md").read_text(encoding="utf-8")
    for path in (*QUEUED, *LIGHT, *OPERATORS):
        assert f"`{path}`" in page, path


def test_the_readme_lists_exactly_the_error_codes_there_are() -> None:
    def codes(error: type[BidgateError]) -> set[str | None]:
        own = {error.answer.code}
        return own.union(*(codes(below) for below in error.__subclasses__()))

    known = codes(BidgateError) | {answer.code for answer in REFUSAL_ANSWERS.values()}
    # Nobody is left to read this one.
    known -= {None, "client_closed_request"}
    table = README.partition("| status | `code` |")[2].partition("\n\n")[0]
    column = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")]
    assert set(re.findall(r"`([a-z_]+)`", " ".join(column))) == known


def test_headers_in_the_readme_are_read() -> None:
    source = Path(hints.__file__).read_text(encoding="utf-8")
    table = README.partition("| header | body |")[2].partition("\n\n")[0]
    headers = set(re.findall(r"`(x-[a-z0-9-]+)`", table))
    assert headers
    read = set(re.findall(r'b"(x-[a-z0-9-]+)"', source)) - {"x-api-key"}
    assert headers == read


def test_the_readme_names_every_policy() -> None:
    table = README.partition("| policy | rule |")[2].partition("\n\n")[0]
    column = [row.split("|")[1] for row in table.splitlines() if row.startswith("| ")]
    assert set(re.findall(r"`([a-z_]+)`", " ".join(column))) == {name.value for name in PolicyName}
