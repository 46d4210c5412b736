"""The step profile and the timed start of scripts/, on a CPU: the same ways, though no kernel is seen."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str = "gpu_steps") -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_steps_of_every_kind_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    cases = ["tiny:4x20", "tiny:4x20:sampled", "tiny:3x40:prefill"]
    found = load().main([*cases, "--rows", "4", "--longest", "160", "--device", "cpu"])
    assert [row["case"] for row in found] == cases
    assert all(row["step_us"] > 0 and row["plan_us"] > 0 and row["submit_us"] > 0 for row in found)
    assert json.loads((tmp_path / "steps.json").read_text()) == found
    assert all(f"{case}: step" in capsys.readouterr().out for case in cases[:1])


def test_kernels_are_summed_and_steps_found() -> None:
    steps = load()
    step = [(0, 2_000, "_advance_kernel"), (1_000, 5_000, "gemm"), (6_000, 7_000, "gemm")]
    events = [(a + n * 10_000, b + n * 10_000, name) for n in range(3) for a, b, name in step]
    assert steps.covered_us(events) == 3 * 6.0
    assert steps.kernels_of(events, 3)[0] == {"kernel": "gemm", "calls": 2.0, "us": 2.5, "us_a_step": 5.0}
    assert steps.steps_of(events) == [events[:3], events[3:6]]


def test_the_start_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("gpu_start").main(["tiny", "--device", "cpu", "--longest", "512"]) > 0
    assert "first token" in capsys.readouterr().out
