"""The command `bidgate`: serve, mock-worker, check-config, explain.

Flags are the settings (settings.py). Whatever is wrong with them is one line on stderr and exit
status 2; an address that cannot be had is one line and exit status 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final, NoReturn

import cyclopts
import structlog
import yaml
from cyclopts import App, Parameter
from pydantic import TypeAdapter, ValidationError

from service.explain import ExplainError, explain_service
from service.listener import ListenError, listen
from service.logs import configure_logging
from service.mock.command import mock_worker
from service.open_files import allow_open_files
from service.secrets import noting_files
from service.settings import ENV_PREFIX, Settings, check_environment, known_names
from service.settings_text import SettingsError, describe

FLAG_ALIASES: Final = {
    "--static-backends": "--workers",
    "--worker-urls": "--workers",
    "--prefill": "--prefill-workers",
    "--decode": "--decode-workers",
    "--routing-logic": "--policy",
    "--queue-size": "--queue-max",
    "--queue-timeout-secs": "--max-wait-s",
    "--connect-timeout-secs": "--connect-timeout-s",
    "--max-payload-size": "--body-bytes-max",
    "--retry-max-retries": "--retries-max",
    "--engine-stats-interval": "--metrics-interval-s",
    "--health-check-interval-secs": "--health-interval-s",
    "--health-check-timeout-secs": "--health-timeout-s",
    "--health-failure-threshold": "--failures-to-down",
    "--drain-timeout": "--drain-s",
    "--intra-node-data-parallel-size": "--data-parallel-size",
}
"""Other routers' spellings. Values mean the same; --workers also takes commas."""
VALUE_ALIASES: Final = {"roundrobin": "round_robin"}


_arguments: ContextVar[list[str]] = ContextVar("arguments")
"""The command line that is being run: settings are read from it again when their file changes."""


def make_app() -> App:
    """Build the command line."""
    app = App(
        name="bidgate",
        version=version("bidgate"),
        help="HTTP router for vLLM decode workers, with a central queue and shadow prices.",
    )
    aliases = "Other routers' flags work too: " + ", ".join(FLAG_ALIASES) + "."
    app.command(serve, help_epilogue=aliases)
    app.command(mock_worker)
    app.command(check_config)
    app.command(explain)
    return app


def serve(*, settings: Annotated[Settings | None, Parameter(name="*")] = None) -> None:
    """Run the router in front of vLLM-compatible servers.

    Every flag is also a setting of the YAML file (--config) and an environment variable:
    `control: {queue_max: 5}`, BIDGATE_CONTROL__QUEUE_MAX=5. Flags win over the environment, the
    environment over the file. `bidgate check-config` prints the result.
    """
    settings = settings or Settings()
    configure_logging(settings.server.log_format, settings.server.log_level)
    log = structlog.get_logger("bidgate")
    # Heavy imports wait until they are needed, so that mistakes are answered at once.
    from service.app import Rereading, assemble
    from service.reload import Loaded
    from service.server import DrainingServer
    from service.tls import ListenerTls

    def reread() -> Loaded:
        with noting_files() as files:
            again = read_settings(_arguments.get())
            again.check()
        return Loaded(settings=again, files=frozenset(files))

    # Once more, so that it is known which files there are to look at.
    context = settings.server.tls_context()
    tls = None if context is None else ListenerTls(context)
    rereading = Rereading(loaded=reread(), load=reread, tls=tls)
    service = assemble(settings, rereading)
    with listen(settings.server.host, settings.server.port) as listener:
        host, port = listener.getsockname()[:2]
        allow_open_files(settings.open_files_needed(), log)
        scheme = "http" if tls is None else "https"
        log.info("listening", url=f"{scheme}://{host}:{port}", policy=settings.control.policy.value)
        server = DrainingServer(service, settings.server, log, tls)
        server.run(sockets=[listener])


def check_config(*, settings: Annotated[Settings | None, Parameter(name="*")] = None) -> None:
    """Check settings and print them in full, as YAML that --config reads; secrets are masked."""
    settings = settings or Settings()
    settings.check()
    values = TypeAdapter(Settings).dump_python(settings, mode="json", exclude={"config"})
    print(yaml.safe_dump(values, sort_keys=False, default_flow_style=False), end="")


def explain(
    address: str = "http://127.0.0.1:8001",
    /,
    *,
    api_key: Annotated[str | None, Parameter(env_var="BIDGATE_EDGE__API_KEY")] = None,
    ca_file: Path | None = None,
) -> None:
    """Say in words who is scarce in a running bidgate, and why requests wait.

    Parameters
    ----------
    address
        Where it listens.
    api_key
        A client's key, where it wants one.
    ca_file
        PEM of who signed its certificate, where that is not one of the system's.
    """
    print(explain_service(address, api_key=api_key, ca_file=ca_file))


def main() -> None:
    """Run the command line of this process."""
    run(sys.argv[1:])


def run(arguments: list[str]) -> None:
    """Run one command line; exits with a status other than 0 when something is wrong."""
    _arguments.set(arguments)
    try:
        check_environment(os.environ)
        with _mistakes_in_words(arguments):
            make_app()(_in_our_words(arguments), exit_on_error=False, print_error=False)
    except SettingsError as error:
        _stop(*error.lines)
    except (ListenError, ExplainError) as error:
        _stop(str(error), status=1)


def read_settings(arguments: list[str]) -> Settings:
    """The settings that a command line, the environment and the file give, read now.

    Raises:
        SettingsError: they cannot be used; says file, line and field where it can.
    """
    with _mistakes_in_words(arguments):
        _, bound, _ = make_app().parse_args(
            _in_our_words(arguments), exit_on_error=False, print_error=False
        )
        return bound.arguments.get("settings") or Settings()


@contextmanager
def _mistakes_in_words(arguments: list[str]) -> Iterator[None]:
    """Turn what the libraries say about settings into one line for each mistake."""
    try:
        yield
    except (ValidationError, cyclopts.CycloptsError) as error:
        cause = error if isinstance(error, ValidationError) else error.__cause__
        if isinstance(cause, ValidationError):
            lines = describe(cause, known_names(), _settings_file(arguments))
        else:
            lines = (_one_line(error),)
        raise SettingsError(*lines) from None


def _settings_file(arguments: list[str]) -> Path | None:
    """The file that the settings name, as far as can be told before they are read."""
    name = os.environ.get(f"{ENV_PREFIX}CONFIG")
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        if flag == "--config":
            name = value
        elif flag.startswith("--config="):
            name = flag.partition("=")[2]
    return Path(name) if name else None


def _in_our_words(arguments: list[str]) -> list[str]:
    """Replace other routers' spellings of flags and values."""
    ours = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        flag = FLAG_ALIASES.get(flag, flag)
        ours.append(flag + equals + value if equals else VALUE_ALIASES.get(flag, flag))
    return ours


def _one_line(error: Exception) -> str:
    if isinstance(error, cyclopts.UnusedCliTokensError):
        words = ", ".join(error.unused_tokens or ())
        return f"no flag stands before {words}; workers are given as --workers URL..."
    return " ".join(str(error).split())


def _stop(*lines: str, status: int = 2) -> NoReturn:
    for line in lines:
        print(f"bidgate: {line}", file=sys.stderr)
    sys.exit(status)
