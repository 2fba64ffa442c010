"""What pages about runs are made of: tables, figures, and a frame that needs no other file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape

from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem auto; }
body { max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.15rem; margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
figure { margin: 1rem 0; } figcaption { color: #555; } img { max-width: 100%; height: auto; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: left; padding: 0.2rem 0.8rem 0.2rem 0; vertical-align: top; }
th, td { border-bottom: 1px solid #eee; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td:first-child { white-space: nowrap; }
td.text:not(:first-child) { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 4.5rem; }
td.text:not(:first-child):last-child { min-width: 11rem; }
@media (max-width: 40rem) { td:first-child { white-space: normal; overflow-wrap: anywhere; } }
"""


def page(title: str, sections: Mapping[str, str]) -> str:
    """A page as HTML.

    Args:
        title: of the page, plain text.
        sections: HTML of each section by its title.
    """
    made = datetime.now(UTC).isoformat(timespec="seconds")
    parts = [f"<section>\n<h2>{name}</h2>\n{text}\n</section>" for name, text in sections.items()]
    view = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">'
    head = f"<head>\n{view}\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>"
    body = "\n".join([f"<h1>{escape(title)}</h1>\n<p>Made {made}.</p>", *parts])
    text = f'<!DOCTYPE html>\n<html lang="en">\n{head}\n<body>\n{body}\n</body>\n</html>\n'
    return text.encode(errors="replace").decode()  # a path may hold bytes that are not UTF-8


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table.

    Args:
        head: titles of the columns.
        rows: cells; numbers are aligned right, and None is an empty cell.
    """
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    whole = f"<table>\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f'<div class="table">{whole}</div>'


def _cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="number">{value:,}</td>'
    if isinstance(value, list | tuple):
        value = " ".join(map(str, value))
    return f'<td class="text">{escape("" if value in (None, {}) else str(value))}</td>'


def figure_element(figure: Figure, caption: str) -> str:
    """An embedded image, whose identifiers cannot clash with those of another figure.

    Args:
        figure: the figure.
        caption: text below it.
    """
    content = io.BytesIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    image = base64.b64encode(content.getvalue()).decode()
    shown = f'<img src="data:image/svg+xml;base64,{image}" alt="{escape(caption)}">'
    return f"<figure>\n{shown}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"
