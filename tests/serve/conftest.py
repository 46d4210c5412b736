"""Servers that many tests share."""

from collections.abc import Iterator

import pytest
from border_drive import OPTIONS, at_rest_behind
from serve_drive import Process, Served, serving

from tandem.serve.options import ServeOptions

MODEL = "tandem.engine.build:make_loop"


@pytest.fixture(scope="session")
def shared() -> Iterator[Served]:
    """The null device with made-up tokens."""
    with serving(ServeOptions(served_model_name=["tiny:1b", "org/tiny"]), max_model_len=512, max_num_seqs=16) as served:
        yield served


@pytest.fixture
def null(shared: Served) -> Iterator[Served]:
    """The shared server; behind each test the canary must be well."""
    shared.canary()
    yield shared
    shared.canary()


@pytest.fixture(scope="session")
def model_server() -> Iterator[Served]:
    """The embedded model."""
    with serving(ServeOptions(served_model_name=["tiny"]), make=MODEL, max_num_seqs=8, max_model_len=2048) as served:
        yield served


@pytest.fixture
def model(model_server: Served) -> Iterator[Served]:
    yield model_server
    model_server.at_rest(10)


@pytest.fixture(scope="module")
def border_process() -> Iterator[Process]:
    """A server in a process of its own, with tight limits at its border."""
    with Process(options=OPTIONS, step_s=0.02, max_model_len=2048) as server:
        yield server


@pytest.fixture
def border(border_process: Process) -> Iterator[Process]:
    with at_rest_behind(border_process):
        yield border_process
