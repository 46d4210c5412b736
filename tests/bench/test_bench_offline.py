"""Benchmarks on a tiny random model and on the null runner: they run, they agree, and their figures add up."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from tandem.bench import drive, offline
from tandem.bench.bandwidth import copy_bandwidth, step_bytes
from tandem.bench.bed import STATIC, Bed
from tandem.bench.compare_llama import parse_llama, run_llama
from tandem.bench.compare_transformers import Transformers
from tandem.bench.decode import decode_table, default_lengths, measure_decode
from tandem.bench.drive import Record, RecordingMailbox, latencies, percentiles
from tandem.bench.host import measure_host
from tandem.bench.machine import machine_facts
from tandem.bench.plots import plot_speeds
from tandem.bench.report import show, table, write_json
from tandem.bench.seed import run_seed, write_pictures
from tandem.bench.workload import chat_messages, fixed, parse_range, random_lengths
from tandem.cli import main
from tandem.engine.loop import Loop
from tandem.errors import TandemError
from tandem.request import Request, SamplingParams

TINY: dict[str, Any] = {"model": "tiny", "load_format": "random", "device": "cpu", "threads": 1}


def test_workloads_are_the_same_everywhere() -> None:
    small = random_lengths(256, (100, 1024), (100, 1024), 151936)
    assert (small.num_prompt_tokens, small.num_new_tokens) == (142_827, 133_966)
    assert fixed(2, 3, 4, 50) == fixed(2, 3, 4, 50) != fixed(2, 3, 4, 50, seed=1)
    assert all(token < 50 for asked in fixed(2, 3, 4, 50).asked for token in asked.prompt)
    chats = [messages[0]["content"] for messages in chat_messages(40)]
    assert len(set(chats)) == 40 and chat_messages(40) == chat_messages(40)
    assert parse_range("64") == (64, 64) and parse_range("3-9") == (3, 9)
    for wrong in ("", "a", "0", "9-3", "-5"):
        with pytest.raises(TandemError, match="hint"):
            parse_range(wrong)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(v) for v in range(1, 101)]
    assert percentiles(values) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0} and percentiles([]) == {}
    record = Record(10.0)
    record.times_s, record.tokens = [11.0, 11.5, 13.0], [1, 2, 3]
    found = latencies([record, Record(10.0)])
    assert found["ttft_s"]["p50"] == 1.0 and found["e2e_s"]["p99"] == 3.0
    assert found["itl_s"] == {"p50": 0.5, "p90": 1.5, "p99": 1.5}


def test_tables_and_json(tmp_path: Path) -> None:
    assert [show(cell) for cell in (None, "x", 12345, 0.12345, 1.2345, 123.45, 12345.6)] == [
        "-", "x", "12,345", "0.123", "1.23", "123.5", "12,346"
    ]  # fmt: skip
    lines = table(("", "a"), [["first", 1], ["x", 22.5]]).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[2].startswith("first")
    write_json(tmp_path / "new" / "x.json", "tandem bench", {"figure": 1}, {"depth": 2})
    document = json.loads((tmp_path / "new" / "x.json").read_text())
    assert document["figure"] == 1 and document["settings"] == {"depth": 2}
    assert {"cpu", "cores", "load", "commit", "torch", "date"} <= set(document["machine"])
    assert machine_facts()["cores"] >= 1


def test_batchings_agree_on_a_real_model_and_figures_are_plausible() -> None:
    with Bed(TINY, 4, depth=3) as bed:
        workload = random_lengths(6, (3, 20), (2, 12), bed.num_known)
        bed.warm(workload)
        comparison = offline.compare_batching(bed, workload, (STATIC, 1, 2, 3), repeats=2)
        resolved = bed.settings
    assert comparison.differing() == dict.fromkeys(("synchronous (depth 1)", "tandem (depth 2)", "tandem (depth 3)"), 0)
    found = comparison.as_dict()
    assert [len(tokens) for tokens in comparison.runs[0].tokens] == [a.max_tokens for a in workload.asked]
    for run in found["runs"]:
        assert run["new_tokens"] == workload.num_new_tokens
        assert 0 < run["ttft_s"]["p50"] <= run["e2e_s"]["p50"] <= run["wall_s"]
        assert 0 < run["timeline"]["device_active_share"] <= 1
    assert found["runs"][0]["padding_share"] > 0 == found["runs"][1]["padding_share"]
    assert resolved["settings"]["prefix_cache"] is False
    text = offline.table_of(comparison)
    assert all(run.name in text for run in comparison.runs)
    assert "equal for all 6" in "".join(offline.lines_about_tokens(comparison))


def test_unequal_tokens_are_seen() -> None:
    with Bed({"device": "null"}, 2) as bed:
        comparison = offline.compare_batching(bed, fixed(2, 4, 4, bed.num_logits), (1, 2))
    comparison.runs[1].records[0].tokens[2] += 1
    assert comparison.differing() == {"tandem (depth 2)": 1}
    assert "1 of 2 requests differ" in offline.lines_about_tokens(comparison)[0]


def test_a_failed_request_fails_the_benchmark() -> None:
    with Bed({"device": "null", "max_model_len": 32}, 2) as bed, pytest.raises(TandemError, match="a request failed"):
        bed.run(1, fixed(1, 40, 4, bed.num_logits))


def test_a_planner_that_stands_still_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        idle = False

        def plan(self) -> None:
            return None

    monkeypatch.setattr(drive, "MAX_EMPTY_TURNS", 5)
    with Bed({"device": "null"}, 2) as bed:
        loop = Loop(Stuck(), bed.built.runner, RecordingMailbox([]))  # type: ignore[arg-type]
        with pytest.raises(TandemError, match="plans nothing"):
            drive.turn(loop)


def test_offline_command_on_the_null_runner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = tmp_path / "figures.json", tmp_path / "speeds.png"
    words = ["bench", "offline", "--device", "null", "--requests", "2", "5", "--prompt", "4-9", "--new", "3-8"]
    assert main([*words, "--json", str(paths[0]), "--plot", str(paths[1])]) == 0
    out = capsys.readouterr().out
    assert "static" in out and "tandem (depth 2)" in out and "5 requests" in out
    document = json.loads(paths[0].read_text())
    assert [c["workload"]["requests"] for c in document["comparisons"]] == [2, 5]
    assert document["command"].startswith("tandem") and document["settings"]["settings"]["device"] == "null"
    assert paths[1].stat().st_size > 5000
    assert main(["bench", "offline", "--device", "null", "--chat", "--new", "4", "--requests", "3"]) == 0
    assert "chat 3 -> 4" in capsys.readouterr().out
    assert main(["bench", "offline", "--device", "null", "--compare", "transformers", "--new", "4"]) == 2
    assert "random weights" in capsys.readouterr().err


def test_the_same_requests_through_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with Bed({"model": str(tmp_path), "device": "cpu", "threads": 1}, 3) as bed:
        workload = random_lengths(3, (4, 12), (6, 9), 128)
        comparison = offline.compare_batching(bed, workload, (2,))
        path = offline.weights_path(bed)
    assert path == tmp_path
    offline.add_transformers(comparison, Transformers(path, "float32"), 1, lambda text: None)
    assert comparison.differing() == {"transformers continuous": 0, "transformers static": 0}
    assert "transformers static" in offline.ratios_table([comparison])
    assert comparison.runs[1].as_dict()["ttft_s"]["p50"] > 0
    assert 0 < comparison.runs[2].padding_share < 1
    plot_speeds([comparison], tmp_path / "speeds.png")
    assert (tmp_path / "speeds.png").stat().st_size > 5000
    with pytest.raises(TandemError, match="could not load"):
        Transformers(tmp_path / "nothing", "float32")


LLAMA_OUTPUT = """
llama_kv_cache: noise
{"n_kv_max": 4096, "pp": 64, "tg": 32, "pl": 1, "n_kv": 96, "t_pp": 0.25, "speed_pp": 256, "t_tg": 0.75, "speed_tg": 42}
{"n_kv_max": 4096, "pp": 64, "tg": 32, "pl": 8, "n_kv": 768, "t_pp": 1.0, "speed_pp": 512, "t_tg": 3.0, "speed_tg": 85}
"""


def test_llama_figures(tmp_path: Path) -> None:
    figures = parse_llama(LLAMA_OUTPUT)
    assert [(f.num_requests, f.tokens_per_s) for f in figures] == [(1, 32.0), (8, 64.0)]
    program = tmp_path / "llama-batched-bench"
    program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/words\ncat <<'END'\n{LLAMA_OUTPUT}\nEND\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    model = tmp_path / "m.gguf"
    assert [f.tokens_per_s for f in run_llama(str(program), model, [8, 1], 64, 32, 2)] == [64.0, 32.0]
    words = (tmp_path / "words").read_text()
    assert "-npp 64 -ntg 32 -npl 8,1 -t 2" in words and "-m " + str(model) in words
    for wrong, message in ((str(tmp_path / "none"), "no program"), ("false", "exit status 1"), ("true", "no figures")):
        with pytest.raises(TandemError, match=message):
            run_llama(wrong, model, [1], 64, 32, 2)
    with pytest.raises(TandemError, match="gguf"):
        run_llama(str(program), tmp_path, [1], 64, 32, 2)


def test_seed_runs_small_on_the_cpu(tmp_path: Path) -> None:
    result = run_seed(TINY, batch=3, prompt=6, new=10)
    assert result.equal and result.floor_s > 0
    assert [run.num_new_tokens for run in result.comparison.runs] == [30] * 4
    text = result.table()
    assert "idle: copy" in text and "floor" in text and "tandem (depth 3)" in text
    names = [path.name for path in write_pictures(result, tmp_path / "new")]
    assert names == ["timeline-depth-1.png", "timeline-depth-2.png"]
    assert json.loads(json.dumps(result.as_dict()))["equal"] is True


def test_decode_times_full_steps_only() -> None:
    figures, used = measure_decode(TINY, [None], [1, 3], prompt=5, new=12)
    assert [(f.batch, f.prompt, f.new) for f in figures] == [(1, 5, 12), (3, 5, 12)]
    assert all(0 < f.step_s <= f.p99_s for f in figures) and len(used) == 1
    assert all(f.floor_s > 0 for f in figures) and figures[1].floor_s > figures[0].floor_s
    assert "of floor" in decode_table(figures)
    assert (
        default_lengths(1) == (256, 512) and default_lengths(32) == (256, 2048) and default_lengths(64) == (1024, 512)
    )


def test_floor_counts_weights_once_and_every_cached_token() -> None:
    with Bed(TINY, 2, padded=False) as bed:
        spec = bed.built.spec
        one, two = step_bytes(bed.built, 1, 10), step_bytes(bed.built, 2, 10)
        assert two - one == 10 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
        assert 2 * one - two == spec.num_parameters * 4, "tied: the embedding is the output matrix, which is read"
    assert 1e8 < copy_bandwidth("cpu", repeats=1) < 1e13


def test_floor_counts_the_experts_that_so_many_tokens_choose(tmp_path: Path) -> None:
    mixture = {"num_local_experts": 4, "num_experts_per_tok": 1}
    sizes = {"vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 64}
    config = {"model_type": "mixtral", "rms_norm_eps": 1e-5, "tie_word_embeddings": True, **sizes, **heads, **mixture}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with Bed({**TINY, "model": str(tmp_path)}, 2, padded=False) as bed:
        one, two, many = (step_bytes(bed.built, batch, 0) for batch in (1, 2, 1000))
        expert = 4 * 2 * 3 * 8 * 16
        assert many == pytest.approx(4 * bed.built.spec.num_parameters) and many - one == pytest.approx(3 * expert)
        assert two - one == pytest.approx(0.75 * expert), "the second token chooses one of the other three mostly"


def test_host_figures() -> None:
    figure, settings = measure_host({}, 4, 100, num_steps=30)
    assert figure.batch == 4 and figure.waiting == 100
    parts = figure.plan_us, figure.submit_us, figure.collect_us, figure.settle_us
    assert all(0 <= part < 5000 for part in parts) and 0 < figure.total_us <= figure.p99_us
    assert settings["settings"]["max_waiting"] == 105 and settings["settings"]["device"] == "null"


def test_requests_carry_the_workloads_lengths() -> None:
    requests: list[Request] = drive.requests_of(fixed(2, 3, 4, 50), SamplingParams(temperature=0.5), eos=(1,))
    assert [(r.params.max_tokens, r.params.ignore_eos, r.params.temperature, r.eos) for r in requests] == [
        (4, True, 0.5, (1,))
    ] * 2
    assert len({r.id for r in requests}) == 2
