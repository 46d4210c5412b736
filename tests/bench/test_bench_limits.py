"""Benchmarks at the edges: short contexts, short answers, little memory, places that cannot be written."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.bench import bandwidth, seed
from tandem.bench.decode import decode_table, measure_decode, why_none
from tandem.bench.lengths import Lengths
from tandem.cli import main
from tandem.engine.build import describe
from tandem.errors import ModelError, SettingError

TINY: dict[str, Any] = {"model": "tiny", "load_format": "random", "device": "cpu"}
SEED = ["bench", "seed", "--model-config", "tiny", "--device", "null", "--batch", "2"]


def test_usual_lengths_fit_the_context_and_asked_ones_are_refused_with_what_fits() -> None:
    said: list[str] = []
    lengths = Lengths(TINY, new_option="--tokens", on_phase=said.append)
    assert lengths.fit(None, None, (256, 8192)) == (256, 256)
    assert said == ["--tokens is 256, not 8,192: the model's context is 512 tokens"]
    assert lengths.fit(500, None, (256, 8192)) == (500, 12)
    with pytest.raises(SettingError, match="the model's context, 512 tokens") as caught:
        lengths.fit(100, 9000, (256, 8192))
    assert caught.value.hint == "lower --tokens to at most 412."
    with pytest.raises(SettingError, match="max_model_len, 100 tokens"):
        Lengths({**TINY, "max_model_len": 100}).fit(200, None, (256, 512))


def test_a_batch_that_never_decodes_together_has_no_times_and_a_note_that_holds() -> None:
    short = {**TINY, "max_batch_tokens": 8}
    figures, _ = measure_decode(short, [None], [8], prompt=8, new=4)
    assert figures[0].step_s is None and figures[0].host_s is None
    assert "0.00 ×" not in decode_table(figures) and "note: tiny, batch 8:" in decode_table(figures)
    enough = int(str(figures[0].note).split("--new ")[1].split()[0])
    assert enough == int(why_none(8, 8, 4, 2, 8).split("--new ")[1].split()[0])
    figures, _ = measure_decode(short, [None], [8], prompt=8, new=enough)
    assert figures[0].step_s and figures[0].note is None


def test_short_prompts_all_enter_at_once() -> None:
    """The cache has the blocks that are kept for those that run."""
    figures, _ = measure_decode(TINY, [None], [4], prompt=16, new=8, depth=4)
    assert figures[0].step_s is not None


def test_the_cost_of_determinism_is_beside_the_step() -> None:
    figures, used = measure_decode({**TINY, "deterministic": True}, [None], [2], prompt=4, new=6)
    assert used[0]["settings"]["deterministic"] is True
    found = figures[0]
    assert found.step_s and found.without_deterministic_s
    assert found.deterministic_cost == pytest.approx(found.step_s / found.without_deterministic_s - 1)
    assert "without deterministic" in decode_table(figures) and "%" in decode_table(figures).splitlines()[-1]


def test_little_memory_makes_smaller_buffers_and_none_loses_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ones, most = torch.ones, bandwidth.LEAST_BYTES

    def limited(count: Any, **options: Any) -> torch.Tensor:
        if isinstance(count, int) and count * 4 > most:
            raise torch.OutOfMemoryError("no memory")
        return ones(count, **options)

    monkeypatch.setattr(torch, "ones", limited)
    assert (bandwidth.copy_bandwidth("cpu", repeats=1) or 0) > 0
    most = 0
    assert bandwidth.copy_bandwidth("cpu", repeats=1) is None
    result = seed.run_seed(TINY, batch=2, prompt=4, new=4, depths=(0,))
    assert result.floor_s is None and "static" in result.table() and "floor" not in result.table()


def test_seed_writes_into_a_new_folder_and_says_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SEED, "--tokens", "4", "--depths", "0"]) == 0
    first = capsys.readouterr()
    assert "tandem-seed/seed.json" in first.out and "inf" not in first.out
    assert main([*SEED, "--tokens", "4", "--depths", "1"]) == 0
    assert "tandem-seed-2/seed.json" in capsys.readouterr().out
    assert json.loads((tmp_path / "tandem-seed" / "seed.json").read_text())["runs"][0]["name"] == "static"
    assert main([*SEED, "--tokens", "4", "--depths", "1", "--out", "tandem-seed"]) == 0
    assert "holds an earlier result" in capsys.readouterr().err
    assert main([*SEED, "--tokens", "9000"]) == 2 and not (tmp_path / "tandem-seed-3").exists()


@pytest.mark.parametrize(
    "words",
    [
        [*SEED, "--out", "/dev/null/x"],
        ["bench", "decode", "--device", "null", "--json", "/dev/null/x"],
        ["bench", "offline", "--device", "null", "--json", "/dev/null/x"],
        ["bench", "host", "--json", "/dev/null/x"],
        ["bench", "serve", "--json", "/dev/null/x"],
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: nothing can be written")


def test_a_wrong_shape_is_told_the_nearest_and_all_without_asking_the_hub() -> None:
    with pytest.raises(ModelError, match=r"no built-in shape 'llama3.1-8b'") as caught:
        describe({"model": "llama3.1-8b", "load_format": "random"})
    assert "did you mean 'llama-3.1-8b'?" in str(caught.value.hint) and "qwen3-0.6b" in str(caught.value.hint)


def test_a_raised_token_budget_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "--device", "null", "--requests", "8", "--max-batch-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    assert "max_batch_tokens is 16, not 4" in err and "model null" in out


def test_gpu_prefill_helps_anywhere() -> None:
    script = Path(__file__).parents[2] / "scripts" / "gpu_prefill.py"
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "FlashInfer" in done.stdout and not done.stderr
