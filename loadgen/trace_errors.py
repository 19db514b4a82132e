"""What goes wrong with a trace, as one sentence that names the file and the row."""

from __future__ import annotations


class TraceError(ValueError):
    """A trace that cannot be read; the message is one line for a person."""

    @classmethod
    def at(cls, path: object, line: int, problem: str, unit: str = "") -> TraceError:
        """Name the file and the place: "path:12: ..." or, with a unit, "path: row 12: ..."."""
        place = f"{path}: {unit} {line}" if unit else f"{path}:{line}"
        return cls(f"{place}: {problem}")
