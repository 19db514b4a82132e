"""Markdown, PNG and one HTML page from documents; nothing is computed here but text.

README.md is the index: for each figure and table of the paper our picture, the setting and the
verdict. One page an experiment holds its tables.
"""

from __future__ import annotations

import base64
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import jinja2

from loadgen.experiments.costs import total
from loadgen.experiments.document import Cell, Chart, Claim, Column, Document, Spread, read_document
from loadgen.experiments.pictures import draw_chart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadgen.experiments.costs import Cost

TEMPLATES = Path(__file__).with_name("templates")
INDEX_FILE = "README.md"
PAGE_FILE = "experiments.html"
NOTHING = "-"
FEW_CHARTS = 4
"""So many are drawn before other processes have started."""
OURS = "ours"
TIMES = "\N{MULTIPLICATION SIGN}"


def read_documents(folder: Path, order: Sequence[str]) -> list[Document]:
    """Read NAME.json of every name that is there, in the given order."""
    paths = [folder / f"{name}.json" for name in order]
    return [read_document(path) for path in paths if path.is_file()]


def write_pages(
    documents: Sequence[Document],
    folder: Path,
    jobs: int = 1,
    costs: Mapping[str, Cost] = MappingProxyType({}),
) -> list[Path]:
    """Write pictures, one Markdown page a document, and the index.

    Args:
        documents: in the order of the index.
        folder: where to.
        jobs: processes that draw.
        costs: of the documents' simulations, where they are known.

    Returns:
        What was written.
    """
    written = _draw([chart for document in documents for chart in document.charts], folder, jobs)
    for document in documents:
        page = folder / f"{document.name}.md"
        page.write_text(_render("experiment.md.j2", document=document), encoding="utf-8")
        written.append(page)
    index = folder / INDEX_FILE
    shown = {each.name: costs[each.name] for each in documents if each.name in costs}
    text = _render(
        "index.md.j2",
        documents=documents,
        claims=sorted_claims(documents),
        costs=shown,
        total=total(shown),
    )
    index.write_text(text, encoding="utf-8")
    return [*written, index]


def _draw(charts: Sequence[Chart], folder: Path, jobs: int) -> list[Path]:
    """Draw pictures; each takes most of a second, so many are shared out to processes."""
    draw = partial(draw_chart, folder=folder)
    if jobs <= 1 or len(charts) <= FEW_CHARTS:
        return [draw(chart) for chart in charts]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(draw, charts))


def write_html(documents: Sequence[Document], folder: Path) -> Path:
    """Write one page with everything inside; its pictures must lie in the folder already."""
    pictures = {
        chart.name: base64.b64encode((folder / f"{chart.name}.png").read_bytes()).decode()
        for document in documents
        for chart in document.charts
    }
    page = folder / PAGE_FILE
    text = _render("experiments.html.j2", documents=documents, pictures=pictures)
    page.write_text(text, encoding="utf-8")
    return page


def sorted_claims(documents: Sequence[Document]) -> list[tuple[Document, Claim]]:
    """Claims of the paper in its order: figures, then tables, then what it says elsewhere."""
    found = [(document, claim) for document in documents for claim in document.claims]
    paper = [pair for pair in found if not pair[1].source.startswith(OURS)]
    return sorted(paper, key=lambda pair: _place(pair[1].source))


def _place(source: str) -> tuple[int, int]:
    kind, _, rest = source.partition(" ")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    order = {"Figure": 0, "Table": 1}.get(kind, 2)
    return order, int(digits or 0)


def cell_text(cell: Cell, column: Column) -> str:
    """Write a cell: mean, range over seeds, ratio to the base row."""
    if cell.value is None:
        return NOTHING
    text = spread_text(cell.value, column)
    return f"{text} {TIMES}{cell.ratio.mean:.2f}" if cell.ratio is not None else text


def spread_text(value: Spread, column: Column) -> str:
    """Write a mean, and the range over seeds when there is one."""
    low, mean, high = (_number(v, column) for v in (value.low, value.mean, value.high))
    return mean if low == high else f"{mean} [{low}, {high}]"


def _number(value: float, column: Column) -> str:
    match column.unit:
        case "%":
            return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"
        case "count":
            return f"{value:.0f}"
        case _:
            return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _escaped(text: str) -> str:
    """Keep text inside one cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def _render(template: str, **values: object) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=template.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = cell_text
    environment.filters["one_line"] = _escaped
    return environment.get_template(template).render(**values)
