"""What the terminal shows while the user waits: a bar for downloads, a spinner for loading. It draws on stderr only."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Waiting:
    """Shows nothing: stderr is no terminal."""

    def phase(self, text: str) -> None:
        """Say what is being done."""

    def download(self, done: int, total: int) -> None:
        """So many bytes of so many."""


class _Drawn(Waiting):
    def __init__(self, progress: Any) -> None:
        self._progress = progress
        self._task: Any = None
        self._bytes: Any = None

    def phase(self, text: str) -> None:
        if self._task is None:
            self._task = self._progress.add_task(text, total=None)
        self._progress.update(self._task, description=text)

    def download(self, done: int, total: int) -> None:
        if self._bytes is None:
            self._bytes = self._progress.add_task("fetching the model", total=total)
        self._progress.update(self._bytes, completed=done, total=total)


@contextmanager
def waiting() -> Iterator[Waiting]:
    """A bar or spinner for as long as the context lasts; it leaves nothing behind on the screen."""
    if not sys.stderr.isatty():
        yield Waiting()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn

    class Size(DownloadColumn):
        def render(self, task: Any) -> Any:
            return super().render(task) if task.total else ""

    class Bar(BarColumn):
        def render(self, task: Any) -> Any:
            return super().render(task) if task.total else ""

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        Bar(bar_width=30),
        Size(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        yield _Drawn(progress)
