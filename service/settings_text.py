"""The settings file as text: reading it strictly, and saying where in it a mistake is."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import orjson
import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from service.secrets import note_file

UNION_BRANCHES: Final = ("str", "WorkerSettings", "DnsConfig", "KubernetesConfig")
UNKNOWN_KINDS: Final = ("extra_forbidden", "unexpected_keyword_argument")
SECRET_WORDS: Final = ("key", "secret", "password", "token")
MISTAKES_SHOWN_MAX: Final = 10
FILE_BYTES_MAX: Final = 16 * 1024 * 1024


class SettingsError(Exception):
    """The settings cannot be used.

    Args:
        lines: for the operator, one for each mistake, the first to mend first; at least one.

    Attributes:
        lines: the first few of them, and how many more there are.
    """

    def __init__(self, *lines: str) -> None:
        more = len(lines) - MISTAKES_SHOWN_MAX
        tail = (f"and {more} more mistakes",) if more > 0 else ()
        self.lines = lines[:MISTAKES_SHOWN_MAX] + tail
        super().__init__("; ".join(self.lines))


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping: YAML's usual loader takes the last one.

    Values that look like numbers or dates and are none are YAML errors like any other.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
            # The value is not repeated: it may be a secret.
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"a value is no {kind}; quote it if it is text", node.start_mark
            ) from error

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} stands twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> object:
    """Read a YAML file.

    Raises:
        SettingsError: it cannot be read, is too long, or is no YAML; says the line.
    """
    text = read_text(path)
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = "" if mark is None else f":{mark.line + 1}"
        problem = " ".join((error.problem or "cannot be understood").split())
        raise SettingsError(f"{path}{line}: not valid YAML: {problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise SettingsError(f"{path}: not valid YAML: {words}") from error


def read_text(path: Path) -> str:
    """Read a settings file, and note that it was.

    Raises:
        SettingsError: it cannot be read, or is too long.
    """
    note_file(path)
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise SettingsError(f"{path} is longer than {FILE_BYTES_MAX} bytes")
        return content.decode()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text") from error


def listed(value: object) -> object:
    """The entries of a list that may come as JSON, or as words with commas or spaces between."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            # The error would repeat the text, which may hold secrets.
            raise ValueError("is no JSON list") from None
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    split: list[object] = []
    for part in parts:
        split.extend(part.replace(",", " ").split() if isinstance(part, str) else [part])
    return split


def describe(
    error: ValidationError, known: Iterable[str] = (), path: Path | None = None
) -> tuple[str, ...]:
    """Say what is wrong with settings, one line for each mistake; secrets are not repeated.

    Args:
        error: of the settings' model.
        known: dotted names that there are, to suggest the nearest.
        path: the file that they may have come from.
    """
    places: dict[tuple[str | int, ...], ErrorDetails] = {}
    for problem in error.errors(include_url=False):
        where = tuple(part for part in problem["loc"] if part not in UNION_BRANCHES)
        places.setdefault(where, problem)
    # A worker may be a URL or a mapping; the deeper complaint is about what was meant. A name that
    # is unknown comes before one that is missing: it may be the same.
    above = {where[:depth] for where in places for depth in range(len(where))}
    told = [where for where in places if where not in above]
    told.sort(key=lambda where: places[where]["type"] not in UNKNOWN_KINDS)
    return tuple(_line(places[where], where, known, path) for where in told)


def _line(
    problem: ErrorDetails, where: Sequence[str | int], known: Iterable[str], path: Path | None
) -> str:
    """One mistake, with its place in the file where it has one."""
    words = _words(problem, ".".join(str(part) for part in where), known)
    if path is not None and not where:
        return f"{path}: {words.removeprefix(': ')}"
    line = None if path is None else _line_of(path, where, problem["msg"])
    return words if line is None else f"{path}:{line}: {words}"


def line_of_entry(path: Path, setting: str, text: str) -> int | None:
    """The last line below a setting whose value is the text, or names it among other words."""
    node = _compose(path)
    found = None if node is None else _child(node, setting)
    lines = [] if found is None else [*_lines_with(found[1], text)]
    return lines[-1] if lines else None


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that suggests the nearest known name, or nothing.

    A name that is hardly like any may be the end of one: `port` of `server.port`.
    """
    names = {
        ".".join(parts[: place + 1])
        for parts in (one.split(".") for one in known)
        for place in range(len(parts))
    }
    deepest_first = sorted(names, key=lambda one: (-one.count("."), one))
    ends = {one.rpartition(".")[2]: one for one in deepest_first}
    close = difflib.get_close_matches
    found = [
        *close(name, sorted(names), n=1, cutoff=0.7),
        *(ends[end] for end in close(name.rpartition(".")[2], sorted(ends), n=1, cutoff=0.7)),
        *close(name, sorted(names), n=1, cutoff=0.5),
    ]
    return f"; did you mean {found[0]}?" if found else ""


def _words(problem: ErrorDetails, name: str, known: Iterable[str]) -> str:
    if problem["type"] in UNKNOWN_KINDS:
        without_index = ".".join(part for part in name.split(".") if not part.isdigit())
        return f"unknown setting {name}{nearest(without_index, known)}"
    message = problem["msg"].removeprefix("Value error, ")
    words = f"{name}: {message[:1].lower()}{message[1:]}"
    secret = not name or any(word in name.lower() for word in SECRET_WORDS)
    if not secret and isinstance(problem["input"], (str, int, float)):
        words += f", got {problem['input']!r}"
    return words


def _line_of(path: Path, where: Sequence[str | int], message: str) -> int | None:
    """The line of a setting in a file; None when the file does not have it."""
    node = _compose(path)
    line: int | None = None
    for part in where:
        found = _child(node, part)
        if found is None:
            break
        key, node = found
        line = key.start_mark.line + 1
    if line is not None and isinstance(node, yaml.MappingNode):
        # A group complains as a whole and names the field in its message.
        named = [key for key, _ in node.value if str(key.value) in message]
        line = named[0].start_mark.line + 1 if named else line
    return line


def _compose(path: Path) -> yaml.Node | None:
    """The file's nodes with their places; None where it cannot be read."""
    try:
        return yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None


def _lines_with(node: yaml.Node, text: str) -> Iterator[int]:
    if isinstance(node, yaml.ScalarNode):
        if node.value == text or text in node.value.replace(",", " ").split():
            yield node.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            yield from _lines_with(entry, text)
    elif isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            yield from _lines_with(value, text)


def _child(node: yaml.Node | None, part: str | int) -> tuple[yaml.Node, yaml.Node] | None:
    """The node of a key or an index, and the node to show for it."""
    if isinstance(node, yaml.MappingNode):
        found = [(key, value) for key, value in node.value if key.value == str(part)]
        return found[-1] if found else None
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None
