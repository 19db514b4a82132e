"""Secrets in the settings: written out, or named by `{env: NAME}` or `{file: PATH}`.

A secret is a pydantic SecretStr from the moment it is read, so no repr, log line or printed
setting shows it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from pydantic import BeforeValidator, SecretStr

SECRET_BYTES_MAX: Final = 64 * 1024

_files: ContextVar[set[Path] | None] = ContextVar("files", default=None)


@contextmanager
def noting_files() -> Iterator[set[Path]]:
    """Collect the files that settings are read from while the block runs."""
    found: set[Path] = set()
    token = _files.set(found)
    try:
        yield found
    finally:
        _files.reset(token)


def note_file(path: Path) -> None:
    """Say that a file is being read; whoever reloads settings looks at it again."""
    found = _files.get()
    if found is not None:
        found.add(path)


def find_secret(value: object) -> object:
    """Replace `{env: NAME}` and `{file: PATH}` by the secret they name; others stay as they are.

    Raises:
        ValueError: the variable is not set, the file cannot be read, or the secret is empty.
    """
    if not isinstance(value, Mapping):
        return _not_empty(value)
    match dict(value):
        case {"env": str(name), **rest} if not rest:
            if name not in os.environ:
                raise ValueError(f"the environment variable {name} is not set")
            return _not_empty(os.environ[name])
        case {"file": str(name), **rest} if not rest:
            return _not_empty(_read(Path(name)))
    raise ValueError("a secret is a string, {env: NAME} or {file: PATH}")


def _read(path: Path) -> str:
    note_file(path)
    try:
        with path.open("rb") as file:
            content = file.read(SECRET_BYTES_MAX + 1)
        if len(content) > SECRET_BYTES_MAX:
            raise ValueError(f"{path} is longer than {SECRET_BYTES_MAX} bytes")
        return content.decode().strip()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        # The error would repeat the bytes.
        raise ValueError(f"{path} is not UTF-8 text") from error.__cause__


def _not_empty(value: object) -> object:
    if value == "":
        raise ValueError("the secret is empty")
    return value


Secret: TypeAlias = Annotated[SecretStr, BeforeValidator(find_secret)]
"""The type of a secret in a group of settings."""
