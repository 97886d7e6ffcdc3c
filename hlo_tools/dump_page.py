"""The index page of a dump: each compile, before beside after."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

_STYLE = """:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: 6px 8px; border-bottom: 1px solid #8885; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
.rewritten { color: #18794e; font-weight: 600; } .error { color: #c02b2b; }"""
_COLUMNS = (
    ("StableHLO", ("stablehlo_before_stage", "stablehlo_after_stage")),
    ("HLO", ("before_optimizations", "after_optimizations")),
    ("more", ("buffer_assignment", "report", "cost")),
)
_SHORT = {
    "stablehlo_before_stage": "before stage",
    "stablehlo_after_stage": "after stage",
    "before_optimizations": "before XLA",
    "after_optimizations": "after XLA",
    "buffer_assignment": "buffers",
}


def index_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page, from the rows of index.json."""
    heads = "".join(f"<th>{name}" for name, _ in _COLUMNS)
    body = "".join(_row(row) for row in rows)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>hlo-tools dump</title>"
        f"<style>{_STYLE}</style><h1>{len(rows)} compiled programs</h1>"
        f"<table><tr><th>#<th>function<th>device<th>stage{heads}"
        f"<th>passes<th>FLOPs<th>temp bytes</tr>{body}</table>"
    )


def _row(row: Mapping[str, Any]) -> str:
    cells = [f"<td>{row['number']}", f"<td>{html.escape(row['name'])}"]
    cells.append(f"<td>{html.escape(row['device'])}")
    if row["error"]:
        cells.append(f"<td class=error>{html.escape(row['error'])}")
    else:
        cells.append(f"<td class='{row['stage'].split()[0]}'>{row['stage']}")
    for _, kinds in _COLUMNS:
        links = [
            _link(row["files"][k], _SHORT.get(k, k)) for k in kinds if k in row["files"]
        ]
        cells.append("<td>" + " &rarr; ".join(links))
    passes = row["passes"]
    cells.append("<td>" + (_link(passes[0], f"{len(passes)}") if passes else ""))
    flops = row["flops"]
    cells.append(f"<td class=n>{'' if flops is None else f'{flops:,.0f}'}")
    temp = row["memory"].get("temp")
    cells.append(f"<td class=n>{'' if temp is None else f'{temp:,}'}")
    return f"<tr>{''.join(cells)}</tr>"


def _link(target: str, words: str) -> str:
    return f"<a href='{html.escape(target, quote=True)}'>{html.escape(words)}</a>"
