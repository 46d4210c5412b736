"""What fits into memory: blocks, lengths, the token budget's estimate, and what is said when it does not fit."""

import dataclasses
import io
import json

import pytest

from tandem.config import Facts, Settings
from tandem.engine.build import describe
from tandem.engine.null_model import byte_tokenizer_json
from tandem.engine.sizing import (
    Shape,
    block_bytes_of,
    estimate_max_batch_tokens,
    facts_of,
    fit_cache,
    fit_length,
    free_host_bytes,
    num_known_ids,
)
from tandem.errors import DeviceMemoryError

GIB = 1 << 30
LLAMA_8B = Shape(128256, 131072, 8_030_261_248, 2 * 32 * 8 * 128, "bfloat16")
SMALL = Shape(100, 1000, 1_000_000, 512, "float32")


def facts(shape: Shape, device: str, free_bytes: int) -> Facts:
    return facts_of(shape, device, "a device", free_bytes)


def test_estimate_is_the_formula() -> None:
    """(memory × utilisation − parameters × bytes) / (2 × layers × kv_heads × head_dim × bytes)"""
    resolved = Settings(gpu_memory_utilization=0.9).resolve(facts(LLAMA_8B, "cuda", 140 * GIB))
    expected = (140 * GIB * 0.9 - 8_030_261_248 * 2) / (2 * 32 * 8 * 128 * 2)
    assert abs(estimate_max_batch_tokens(resolved, LLAMA_8B) - expected) <= 1
    assert resolved.facts.free_bytes == 140 * GIB - 8_030_261_248 * 2
    nothing = Settings(gpu_memory_utilization=0.1).resolve(facts(LLAMA_8B, "cuda", 100 * GIB))
    assert estimate_max_batch_tokens(nothing, LLAMA_8B) == 0


def test_cache_is_no_larger_than_all_rows_can_fill_unless_asked() -> None:
    found = fit_cache(Settings(max_num_seqs=2).resolve(facts(SMALL, "cpu", 8 * GIB)), SMALL)
    block_bytes = block_bytes_of(found.settings, SMALL)
    assert block_bytes == 16 * 512 * 4
    assert (
        found.settings.kv_cache_memory == 2 * (63 + 1) * block_bytes
        and "max_num_seqs" in found.reasons["kv_cache_memory"]
    )
    asked = fit_cache(Settings(max_num_seqs=2, kv_cache_memory=GIB).resolve(facts(SMALL, "cpu", 8 * GIB)), SMALL)
    assert asked.settings.kv_cache_memory == GIB


def test_a_context_that_does_not_fit_is_lowered_with_a_reason_or_refused_when_asked() -> None:
    memory = 10 * 16 * 512 * 4
    lowered = fit_cache(Settings(kv_cache_memory=memory).resolve(facts(SMALL, "cpu", 8 * GIB)), SMALL)
    assert lowered.settings.max_model_len == 160 and "1000" in lowered.reasons["max_model_len"]
    asked = Settings(kv_cache_memory=memory, max_model_len=200).resolve(facts(SMALL, "cpu", 8 * GIB))
    with pytest.raises(DeviceMemoryError, match="10 blocks, 160 tokens; max_model_len is 200") as caught:
        fit_cache(asked, SMALL)
    assert str(13 * 16 * 512 * 4) in caught.value.hint and "160" in caught.value.hint
    with pytest.raises(DeviceMemoryError, match="0 blocks"):
        fit_length(Settings(kv_cache_memory=1).resolve(facts(SMALL, "cpu", 8 * GIB)), 0)


def test_more_cache_than_the_host_has_free_is_refused_before_it_is_allocated() -> None:
    asked = Settings.from_dict({"kv_cache_memory": "500TB", "max_model_len": 100})
    with pytest.raises(DeviceMemoryError, match=str(500 * 10**12)) as caught:
        fit_cache(asked.resolve(facts(SMALL, "cpu", 8 * GIB)), SMALL)
    free_bytes = 8 * GIB - 4_000_000
    assert str(free_bytes) in caught.value.what and str(free_bytes) in caught.value.hint
    fit_cache(asked.resolve(facts(SMALL, "null", 8 * GIB)), SMALL)  # takes none


def test_cached_files_are_free_memory_under_a_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemAvailable:   8388608 kB\n",
        "/sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
        "/sys/fs/cgroup/memory.current": f"{3 * GIB}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
    }
    monkeypatch.setattr("builtins.open", lambda path, *_: io.StringIO(files[path]))
    free = free_host_bytes()
    monkeypatch.undo()
    assert free == 3 * GIB


def test_known_ids_are_those_of_the_tokenizer() -> None:
    assert num_known_ids(None) is None
    assert num_known_ids(byte_tokenizer_json()) == 259
    document = {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}, "added_tokens": [{"id": 7}]}
    assert num_known_ids(json.dumps(document)) == 8


def test_weights_that_do_not_fit_are_told_with_what_would() -> None:
    """Not "kv_cache_memory is 0", which nobody set."""
    for free_bytes in (10 * GIB, 14 * GIB, 2 * LLAMA_8B.num_parameters):
        with pytest.raises(DeviceMemoryError, match=r"8.03 billion parameters in bfloat16, take 14.96 GiB") as caught:
            facts(LLAMA_8B, "cuda", free_bytes)
        assert f"the device has {free_bytes / GIB:.2f} GiB" in caught.value.what
        assert "less than" in str(caught.value.hint) and "dtype" not in str(caught.value.hint)
    with pytest.raises(DeviceMemoryError, match=r"in float32, take 29.92 GiB; the machine has 20.00 GiB") as caught:
        facts(LLAMA_8B, "cpu", 20 * GIB)
    assert "set dtype to bfloat16, in which they take 14.96 GiB" in str(caught.value.hint)
    halved = facts_of(LLAMA_8B, "cpu", "a device", 20 * GIB, "bfloat16")
    assert halved.free_bytes == 20 * GIB - 2 * LLAMA_8B.num_parameters


def test_quantised_weights_count_as_they_are_stored_and_are_advised_where_they_fit() -> None:
    stored = {"dense": (0, 8_030_261_248), "w8a8": (7 * GIB, 500_000_000), "int4": (4 * GIB, 500_000_000)}
    shape = dataclasses.replace(LLAMA_8B, stored=stored)
    with pytest.raises(DeviceMemoryError, match=r"in float32, take 29.92 GiB") as caught:
        facts(shape, "cpu", 8 * GIB)
    assert "set quantize to int4, in which they take 5.86 GiB" in str(caught.value.hint)
    found = facts_of(shape, "cpu", "a device", 8 * GIB, quantize="int4")
    assert found.free_bytes == 4 * GIB - 4 * 500_000_000
    with pytest.raises(DeviceMemoryError, match=r"in float32 with quantize w8a8, take 8.86 GiB"):
        facts_of(shape, "cpu", "a device", 8 * GIB, quantize="w8a8")
    resolved = Settings(quantize="int4").resolve(found)
    left = int(8 * GIB * 0.9) - 4 * GIB - 4 * 500_000_000
    assert abs(estimate_max_batch_tokens(resolved, shape) - left // (2 * 32 * 8 * 128 * 4)) <= 1


def test_only_memory_that_exists_is_advised() -> None:
    weights = 2 * LLAMA_8B.num_parameters
    with pytest.raises(DeviceMemoryError, match=r"0.00 GiB are free") as caught:
        fit_cache(Settings().resolve(facts(LLAMA_8B, "cuda", weights + (1 << 20))), LLAMA_8B)
    assert "17179869184" not in str(caught.value) and "smaller model" in str(caught.value.hint)
    asked = Settings(max_model_len=100_000)
    with pytest.raises(DeviceMemoryError) as caught:
        fit_cache(asked.resolve(facts(LLAMA_8B, "cpu", 2 * weights + 8 * GIB)), LLAMA_8B)
    most = 8 * GIB // (16 * 2 * 32 * 8 * 128 * 4) * 16
    assert f"max_model_len to {most}, the most that fits" in str(caught.value.hint)
    fit_cache(
        Settings(max_model_len=most, kv_cache_memory=8 * GIB).resolve(facts(LLAMA_8B, "cpu", 2 * weights + 8 * GIB)),
        LLAMA_8B,
    )


def test_a_quantised_model_that_fits_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 billion parameters, in int4 with embeddings in float32, on a machine of 12 GiB."""
    monkeypatch.setattr("tandem.engine.sizing.free_host_bytes", lambda: 12 * GIB)
    settings = {"model": "llama-3.1-8b", "load_format": "random", "device": "cpu"}
    with pytest.raises(DeviceMemoryError, match=r"29\.92 GiB"):
        describe(settings)
    resolved, _ = describe({**settings, "quantize": "int4"})
    assert 5 * GIB < resolved.facts.free_bytes < 6 * GIB
