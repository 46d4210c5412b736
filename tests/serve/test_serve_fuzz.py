"""Fuzz by the server's own OpenAPI document: only 2xx and 4xx, errors with a body, and the engine unharmed."""

import os
import warnings

import pytest
from hypothesis import HealthCheck, Phase, settings
from serve_drive import Served, serving

from tandem.serve.options import ServeOptions

MAX_EXAMPLES = int(os.environ.get("TANDEM_FUZZ_EXAMPLES", "12"))
"""For each operation; a long run sets the variable."""


@pytest.mark.filterwarnings("ignore")
def test_schemathesis_finds_nothing() -> None:
    """Every operation, bodies that fit the document and bodies that do not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schemathesis = pytest.importorskip("schemathesis")
    options = ServeOptions(max_time=20.0)
    with serving(options, max_model_len=256, max_num_seqs=16) as served:
        schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
        operations = 0
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.path == "/explain/{name}" or operation.method.upper() not in ("GET", "POST"):
                continue
            operations += 1
            drive(served, schemathesis, operation)
        assert operations >= 11
        served.canary()


def drive(served: Served, schemathesis, operation) -> None:
    from hypothesis import given
    from hypothesis import strategies as st

    modes = [schemathesis.GenerationMode.POSITIVE]
    if operation.method.upper() == "POST":
        modes.append(schemathesis.GenerationMode.NEGATIVE)
    strategy = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])

    @given(case=strategy)
    @settings(
        max_examples=MAX_EXAMPLES, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    def run(case) -> None:
        response = case.call(timeout=20)
        told = (operation.label, case.body, response.status_code, response.text[:300])
        allowed = (504,) if "timeout_s" in str(case.body) else ()
        assert response.status_code in (*range(200, 300), *range(400, 500), *allowed), told
        if response.status_code >= 400 and "application/json" in str(response.headers.get("content-type")):
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}, told
        else:
            assert response.status_code < 300 or response.status_code == 400, told

    run()
