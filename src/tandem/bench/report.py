"""Figures as tables for people and as JSON for machines. It does not measure."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.bench.machine import machine_facts
from tandem.errors import TandemError

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


def check_file(path: str | Path) -> None:
    """Make sure, before anything is measured, that a file can be written there; makes its folder.

    Raises TandemError.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a folder")
        if target.exists():
            if not os.access(target, os.W_OK):
                raise PermissionError(f"{target} may not be written")
        else:
            check_folder(target.parent)
    except OSError as error:
        raise TandemError(
            f"nothing can be written to {target}: {error.strerror or error}.", hint="name another place."
        ) from error


def check_folder(path: str | Path) -> None:
    """Make sure that files can be written into a folder; makes it. Raises TandemError."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise TandemError(
            f"nothing can be written into {path}: {error.strerror or error}.", hint="name another place."
        ) from error


def free_folder(name: str) -> Path:
    """A folder of this name that is not there yet, or is empty: name, name-2, name-3, …"""
    path, number = Path(name), 1
    while path.exists() and not (path.is_dir() and not any(path.iterdir())):
        number += 1
        path = Path(f"{name}-{number}")
    return path


def write_json(path: str | Path, command: str, results: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Results with all that is needed to judge them: command, settings in force, machine."""
    document = {"command": command, "settings": dict(settings), "machine": machine_facts(), **results}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=1, default=str) + "\n")
