"""Parse a bidgate command line as the program would, without running it."""

from __future__ import annotations

from pathlib import Path

from service.cli import make_app
from service.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def parse_command(arguments: list[str]) -> tuple[str, object]:
    """The command's name and its one argument; raises when a flag does not exist."""
    command, bound, _ = make_app().parse_args(arguments, exit_on_error=False, print_error=False)
    values = list(bound.arguments.values())
    return command.__name__, values[0] if values else None


def serve_settings(arguments: list[str]) -> Settings:
    """The settings of a `bidgate serve` command line."""
    name, settings = parse_command(arguments)
    assert name == "serve"
    assert isinstance(settings, Settings)
    return settings
