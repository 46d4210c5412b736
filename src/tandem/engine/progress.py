"""A progress bar on the terminal for offline work. It does not know what is being worked on."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NoBar:
    """Shows nothing."""

    def finish_one(self) -> None: ...

    def add_tokens(self, count: int) -> None: ...


class Bar:
    """Prompts done, and tokens a second; redrawn by rich at its own pace, not at ours."""

    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task
        self._num_tokens = 0
        self._began_s = time.perf_counter()
        self._shown_s = 0.0

    def finish_one(self) -> None:
        self._progress.advance(self._task)
        self._show(0.0)

    def add_tokens(self, count: int) -> None:
        self._num_tokens += count
        self._show(0.1)

    def _show(self, pause_s: float) -> None:
        now_s = time.perf_counter()
        if now_s - self._shown_s >= pause_s:
            self._shown_s = now_s
            self._progress.update(self._task, rate=f"{self._num_tokens / max(now_s - self._began_s, 1e-9):,.0f} tok/s")


@contextmanager
def open_bar(count: int) -> Iterator[Bar | NoBar]:
    """A bar over count prompts on stderr; none if count is 0 or stderr is no terminal."""
    if count == 0 or not sys.stderr.isatty():
        yield NoBar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    with Progress(TextColumn("prompts"), *columns, console=Console(stderr=True), refresh_per_second=5) as progress:
        yield Bar(progress, progress.add_task("prompts", total=count, rate=""))
