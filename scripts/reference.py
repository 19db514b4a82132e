"""Write the reference of settings and metrics from the code that has them: `make reference`.

Settings come from the model of service/settings.py, its flags and its docstrings; metrics from the
page that a running application answers. tests/deploy checks that what is written is current.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import httpx
import yaml
from cyclopts import ArgumentCollection
from docstring_parser import parse
from prometheus_client import Metric

from service.app import assemble
from service.cli import make_app
from service.logs import LogFormat, LogLevel, configure_logging
from service.reload import is_live
from service.settings import MockConfig, Settings
from service.worker_settings import WorkerSettings

ROOT: Final = Path(__file__).resolve().parents[1]
SETTINGS_FILE: Final = ROOT / "deploy" / "settings.yaml"
README: Final = ROOT / "README.md"
CONFIGURATION: Final = ROOT / "docs" / "configuration.md"
METRICS: Final = ROOT / "docs" / "metrics.md"
COMMENT_WIDTH: Final = 96
SCRAPE_MAX_S: Final = 20.0

MOST_USED: Final = (
    "workers",
    "fleet.max_num_seqs",
    "mock.workers",
    "server.host",
    "server.port",
    "server.drain_s",
    "edge.api_key",
    "control.policy",
    "control.weights.ttft",
    "control.weights.e2e",
    "control.weights.ttft_bound_s",
    "control.age_bound_s",
    "control.queue_max",
    "control.max_wait_s",
    "control.no_worker_hold_s",
)
"""Settings of the README's table; docs/configuration.md has all."""

SETTINGS_HEAD: Final = """\
# Every setting of bidgate with its default: bidgate serve --config deploy/settings.yaml
# Flags win over BIDGATE_* variables, those over this file. Leave out what you do not change.
# `make reference` writes this file from the code.
"""
WORKERS_EXAMPLE: Final = ("#  - http://10.0.0.7:8000", "#  - url: http://10.0.0.8:8000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One knob.

    Attributes:
        path: where it is in the settings, outermost first.
        flag: of `bidgate serve`; "" when it has none.
        default: as YAML.
        about: what it means, with its choices.
    """

    path: tuple[str, ...]
    flag: str
    default: str
    about: str

    @property
    def name(self) -> str:
        """Dotted name."""
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric family of the page."""

    name: str
    kind: str
    labels: tuple[str, ...]
    about: str


def settings() -> list[Setting]:
    """Every setting, in the order of the model."""
    defaults = Settings.model_construct()
    flags = {argument.keys: argument.names[0] for argument in _arguments() if argument.show}
    found: list[Setting] = []
    for name, info in Settings.model_fields.items():
        if name == "config":
            continue
        value = getattr(defaults, name)
        if is_dataclass(value) and not isinstance(value, type):
            found.extend(_group((name,), value, flags))
        else:
            about = info.description or ""
            found.append(_setting((name,), value, about, flags))
    return found


def group_titles() -> dict[str, str]:
    """What each group of settings is about."""
    titles: dict[str, str] = {}

    def note(path: tuple[str, ...], value: object) -> None:
        if is_dataclass(value) and not isinstance(value, type):
            titles[".".join(path)] = parse(value.__doc__ or "").short_description or ""
            for spec in fields(value):
                note((*path, spec.name), getattr(value, spec.name))

    defaults = Settings.model_construct()
    for name in Settings.model_fields:
        note((name,), getattr(defaults, name))
    return titles


def settings_file() -> str:
    """The text of deploy/settings.yaml."""
    titles, known = group_titles(), settings()
    lines: list[str] = []
    above: tuple[str, ...] = ()
    for setting in known:
        group = setting.path[:-1]
        for depth in range(len(group)):
            if group[: depth + 1] != above[: depth + 1]:
                indent = "  " * depth
                lines += ["", *_comment(titles[".".join(group[: depth + 1])], indent)]
                lines.append(f"{indent}{group[depth]}:")
                above = group[: depth + 1]
        above = group
        indent = "  " * len(group)
        lines += [*([] if group else [""]), *_comment(setting.about, indent)]
        lines.append(f"{indent}{setting.path[-1]}: {setting.default}")
        if setting.path == ("workers",):
            lines += [*WORKERS_EXAMPLE, *_worker_fields()]
    return SETTINGS_HEAD + "\n".join(lines) + "\n"


def settings_table(names: tuple[str, ...] | None = None) -> str:
    """A Markdown table of these settings, or of all, one table for each group."""
    known = settings()
    if names is not None:
        by_name = {setting.name: setting for setting in known}
        return _table([by_name[name] for name in names], lambda setting: setting.name)
    titles = group_titles()
    groups = dict.fromkeys(".".join(setting.path[:-1]) for setting in known)
    parts: list[str] = []
    for group in groups:
        rows = [setting for setting in known if ".".join(setting.path[:-1]) == group]
        head = f"### `{group}`\n\n{titles[group]}\n" if group else "### Top level\n"
        parts.append(f"{head}\n{_table(rows, lambda setting: setting.path[-1])}")
    return "\n\n".join(parts)


def series() -> list[Series]:
    """Every metric family that a running application with one worker exposes."""
    return [
        Series(
            name=family.name + ("_total" if family.type == "counter" else ""),
            kind=family.type,
            labels=_labels(family),
            about=family.documentation,
        )
        for family in asyncio.run(metric_families())
    ]


def _labels(family: Metric) -> tuple[str, ...]:
    """Those announced, as nobody has used all of them yet, and those of the samples."""
    announced: tuple[str, ...] = tuple(getattr(family, "_labelnames", ()))
    used = (label for sample in family.samples for label in sample.labels)
    return tuple(dict.fromkeys((*announced, *(one for one in used if one != "le"))))


async def metric_families() -> list[Metric]:
    """The metrics of an application whose one embedded mock worker served a request."""
    service = assemble(Settings(mock=MockConfig(workers=1, time_scale=100.0)))
    body = {"model": "mock", "prompt": "Hello", "max_tokens": 4}
    transport = httpx.ASGITransport(service.app)
    async with (
        service.app.router.lifespan_context(service.app),
        httpx.AsyncClient(transport=transport, base_url="http://bidgate") as client,
        asyncio.timeout(SCRAPE_MAX_S),
    ):
        # The queue holds it until the worker is up.
        (await client.post("/v1/completions", json=body)).raise_for_status()
        return list(service.telemetry.registry.collect())


def metrics_table() -> str:
    """A Markdown table of every metric."""
    rows = [
        f"| `{one.name}` | {one.kind} | {', '.join(one.labels)} | {one.about} |" for one in series()
    ]
    return "\n".join(["| metric | type | labels | what it says |", "|---|---|---|---|", *rows])


def filled(path: Path, name: str, text: str) -> str:
    """The file's text with what stands between the markers of `name` replaced.

    Raises:
        ValueError: the file has no such markers.
    """
    begin, end = f"<!-- {name}: written by make reference -->", f"<!-- end of {name} -->"
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, also_found, after = rest.partition(end)
    if not (found and also_found):
        raise ValueError(f"{path} has no markers for {name}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def outputs() -> dict[Path, str]:
    """What every written file should hold."""
    return {
        SETTINGS_FILE: settings_file(),
        README: filled(README, "settings", settings_table(MOST_USED)),
        CONFIGURATION: filled(CONFIGURATION, "settings", settings_table()),
        METRICS: filled(METRICS, "metrics", metrics_table()),
    }


def main() -> None:
    """Write all files."""
    configure_logging(LogFormat.TEXT, LogLevel.WARNING)
    for path, text in outputs().items():
        path.write_text(text, encoding="utf-8")


def _arguments() -> ArgumentCollection:
    return make_app()["serve"].assemble_argument_collection()


def _group(
    path: tuple[str, ...], value: object, flags: dict[tuple[str, ...], str]
) -> Iterator[Setting]:
    assert is_dataclass(value)
    about = {
        entry.arg_name: " ".join((entry.description or "").split())
        for entry in parse(value.__doc__ or "").params
    }
    for spec in fields(value):
        one = getattr(value, spec.name)
        if is_dataclass(one):
            yield from _group((*path, spec.name), one, flags)
        else:
            yield _setting((*path, spec.name), one, about[spec.name], flags)


def _setting(
    path: tuple[str, ...], value: object, about: str, flags: dict[tuple[str, ...], str]
) -> Setting:
    if isinstance(value, StrEnum):
        about = f"{about.rstrip('.')}: {', '.join(type(value))}."
        value = value.value
    default = yaml.safe_dump(list(value) if isinstance(value, tuple) else value)
    default = default.removesuffix("...\n").strip()
    return Setting(path=path, flag=flags.get(path, ""), default=default, about=about)


def _comment(text: str, indent: str) -> list[str]:
    lines, line = [], f"{indent}#"
    for word in text.split():
        if len(line) + 1 + len(word) > COMMENT_WIDTH:
            lines.append(line)
            line = f"{indent}#"
        line += f" {word}"
    return [*lines, line]


def _worker_fields() -> Iterator[str]:
    """The other fields of a worker, as comments of the example."""
    for entry in parse(WorkerSettings.__doc__ or "").params:
        if entry.arg_name != "url":
            yield f"#    {entry.arg_name}:  # {entry.description}"


def _table(rows: list[Setting], name: Callable[[Setting], str]) -> str:
    lines = ["| setting | flag | default | live | meaning |", "|---|---|---|---|---|"]
    for row in rows:
        about = row.about.replace("|", "\\|")
        flag = f"`{row.flag}`" if row.flag else ""
        live = "yes" if is_live(row.name) else ""
        lines.append(f"| `{name(row)}` | {flag} | `{row.default}` | {live} | {about} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
