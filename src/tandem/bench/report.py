"""Figures as tables for people and as JSON for machines. It does not measure."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.bench.machine import machine_facts

Cell = str | int | float | None


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Columns of equal width, the first to the left, the others to the right; None is a dash."""
    lines = [list(header), *[[show(cell) for cell in row] for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def line_of(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))])

    return "\n".join([line_of(lines[0]), "  ".join("-" * width for width in widths), *map(line_of, lines[1:])])


def show(cell: Cell) -> str:
    """Numbers with three or four digits that matter."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    for least, digits in ((1000, 0), (100, 1), (1, 2)):
        if abs(cell) >= least:
            return f"{cell:,.{digits}f}"
    return f"{cell:.3f}"


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def percent(share: float | None) -> str | None:
    return None if share is None else f"{share * 100:.2f} %"


def write_json(path: str | Path, command: str, results: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Results with all that is needed to judge them: command, settings in force, machine."""
    document = {"command": command, "settings": dict(settings), "machine": machine_facts(), **results}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=1, default=str) + "\n")
