"""Buckets, clock, memory and slots of the GPU runner, without a GPU."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.attention.contract import KVCache
from tandem.attention.reference import ReferenceAttention
from tandem.config import Facts, Resolved, Settings
from tandem.errors import DeviceMemoryError
from tandem.models.named import named_config
from tandem.models.registry import build, spec_from_config
from tandem.runner import startup
from tandem.runner.clock import WINDOW, DeviceClock, Timekeeper
from tandem.runner.cuda import CudaRunner
from tandem.runner.graphs import MOST_PADDING, GraphKey, Graphs, Lanes, buckets_up_to, is_uneven
from tandem.runner.memory import SLACK_BYTES, MemoryFacts, cache_blocks, check_weights
from tandem.runner.outcome import Drawn
from tandem.runner.slots import Slot
from tandem.runner.streams import EagerStreams
from tandem.weights.source import locate

GIB = 1 << 30


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8192))
def test_padding_stays_under_15_percent(limit):
    graphs = Graphs(EagerStreams(), lambda key, bound: None, limit)
    assert graphs.buckets == sorted(set(graphs.buckets)) and graphs.buckets[-1] == limit
    assert len(graphs.buckets) < 70
    for size in range(1, limit + 1, max(1, limit // 500)):
        bucket = graphs.bucket_of(size)
        assert bucket >= size and (bucket - size) / bucket < MOST_PADDING


def test_buckets_are_round_where_they_can_be():
    assert buckets_up_to(40) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40]


def test_lanes_know_which_spans_are_longest_and_padding_comes_last():
    lanes = Lanes.allocate(8, 4, 16, torch.float32, torch.device("cpu"))
    assert lanes.order_S.tolist() == list(range(8))
    sent = Lanes.arrays(6, np.array([5, 0, 3, 1]), np.array([10, 40, 10, 70]), None)
    lanes.take({name: torch.from_numpy(array) for name, array in sent.items()})
    assert lanes.batch(6, 128).order_S.tolist() == [3, 1, 0, 2, 4, 5]
    assert lanes.rows_S.tolist()[:6] == [5, 0, 3, 1, -1, -1] and lanes.starts_S.tolist()[:4] == [10, 40, 10, 70]


def test_a_graph_is_captured_behind_its_first_run_and_then_replayed():
    ran = []
    graphs = Graphs(EagerStreams(), lambda key, bound: ran.append((key, bound)), 8)
    keys = [(GraphKey(size, "greedy", (1,)), 256) for size in (8, 4, 2)]
    assert graphs.prepare(keys, most_s=60.0) == len(graphs) == 3
    assert ran == keys
    graphs.step(*keys[1])
    graphs.step(GraphKey(3, "greedy", (1,)), 256)
    assert len(graphs) == 4 and len(ran) == 5


def test_a_graph_without_memory_is_done_without():
    class Full(EagerStreams):
        def capture(self, run):
            raise torch.OutOfMemoryError("made up")

    ran = []
    graphs = Graphs(Full(), lambda key, bound: ran.append(key), 8)
    for _ in range(3):
        graphs.step(GraphKey(2, "greedy", (1,)), 256)
    assert len(ran) == 3 and graphs.num_failed == 1 and len(graphs) == 0


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.floats(-50e-6, 50e-6))
def test_the_clock_stays_with_the_hosts_whatever_the_drift(seed, drift):
    rng = random.Random(seed)
    clock, true_s, device_s = DeviceClock(), 100.0, 0.0
    clock.anchor(true_s)
    worst = 0.0
    for step in range(20 * WINDOW):
        duration_s = rng.uniform(0.5e-3, 2e-3)
        true_s += duration_s
        elapsed_s = duration_s * (1.0 + drift)
        device_s += elapsed_s
        now_s = clock.move(elapsed_s)
        clock.seen(now_s, true_s + 5e-6 + rng.expovariate(1 / 20e-6))
        if step > 2 * WINDOW:
            worst = max(worst, abs(clock.now_s - true_s))
    assert worst < 150e-6


def test_times_are_told_from_the_end_of_the_step_before():
    times = Timekeeper(EagerStreams(), depth=2)
    streams, last_s = times.streams, 0.0
    for _ in range(6):
        moments = times.begin(idle=last_s == 0.0)
        for name in ("began", "computed"):
            streams.record(getattr(moments, name), "compute")
        streams.record(moments.home, "out")
        told = times.end(moments, waited=False)
        assert told.submitted_s - 1e-4 <= told.began_s <= told.computed_s <= told.home_s
        assert told.began_s >= last_s
        last_s = told.computed_s


def facts(**changes):
    base = {"total": 80 * GIB, "outside": GIB, "weights": 16 * GIB, "activations": 2 * GIB, "graphs": GIB}
    return MemoryFacts(**{**base, "max_tokens": 8192, **changes})


def test_the_cache_gets_what_is_left():
    free = int(80 * GIB * 0.9) - 20 * GIB - SLACK_BYTES
    assert cache_blocks(facts(), 0.9, 2 << 20, 16) == free // (2 << 20)
    assert cache_blocks(facts(), 0.9, 2 << 20, 16, asked_bytes=GIB) == 512


def test_too_little_memory_names_a_setting_and_a_value_that_will_do():
    with pytest.raises(DeviceMemoryError, match=r"raise gpu_memory_utilization to 0\.(\d+)") as caught:
        cache_blocks(facts(), 0.2, 2 << 20, 512)
    share = float(caught.value.hint.split("to ")[-1].rstrip("."))
    assert cache_blocks(facts(), share, 2 << 20, 512) >= 512
    tight = facts(total=24 * GIB, activations=8 * GIB)
    with pytest.raises(DeviceMemoryError, match="lower max_batch_tokens from 8192 to") as caught:
        cache_blocks(tight, 0.9, 2 << 20, 512)
    tokens = int(caught.value.hint.split(" to ")[1].split(";")[0])
    less = facts(total=24 * GIB, activations=8 * GIB * tokens // 8192, max_tokens=tokens)
    assert cache_blocks(less, 0.97, 2 << 20, 512) >= 512
    with pytest.raises(DeviceMemoryError, match="smaller model"):
        cache_blocks(facts(total=16 * GIB), 0.9, 2 << 20, 512)
    with pytest.raises(DeviceMemoryError, match="kv_cache_memory to at most"):
        cache_blocks(facts(), 0.9, 2 << 20, 16, asked_bytes=200 * GIB)


def test_weights_that_leave_no_room_are_told_of_before_they_are_loaded():
    known = facts(weights=70 * GIB, activations=0, graphs=0)
    check_weights(known, 0.97)
    with pytest.raises(DeviceMemoryError, match=r"weights take 70.00 GiB: of 80.00 GiB, 80%") as caught:
        check_weights(known, 0.8)
    check_weights(known, float(caught.value.hint.split("above ")[1].split(",")[0]) + 0.01)
    assert "free the device" not in caught.value.hint
    with pytest.raises(DeviceMemoryError, match=r"smaller model.* or free the device of the 45.00 GiB"):
        check_weights(facts(weights=40 * GIB, outside=45 * GIB, activations=0, graphs=0), 0.9)


def test_memory_that_runs_out_while_weights_are_loaded_is_told(monkeypatch):
    def runs_out(*args, **options):
        raise torch.OutOfMemoryError("tried to allocate 3.91 GiB")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    spec = spec_from_config(named_config("tiny"))
    source = locate("tiny", load_format="random", named_config=named_config)
    args = spec, source, Settings(device="cpu"), torch.float32, torch.device("cpu"), False
    with (
        monkeypatch.context() as patch,
        pytest.raises(DeviceMemoryError, match="had 6144 MiB of 8192 MiB") as told,
    ):
        patch.setattr(startup, "load", runs_out)
        startup._load(*args)
    assert "smaller model" in told.value.hint
    assert startup._load(*args).spec is spec


def test_state_is_what_a_runner_holds_on_the_device():
    """131,072 positions, 1,024 rows and depth 3 take as much as the slack; so it counts."""
    asked = Settings(device="cpu", max_num_seqs=9, max_batch_tokens=80, max_model_len=96, block_size=4, depth=3)
    spec = spec_from_config(named_config("tiny"))
    model = build(spec, torch.float32, "cpu", max_length=96)
    cache = KVCache.allocate(
        spec.num_layers, 4, 4, spec.num_kv_heads, spec.head_dim, torch.float32, torch.device("cpu")
    )  # fmt: skip
    runner = CudaRunner(
        model, cache, ReferenceAttention(), EagerStreams(), num_rows=9, max_length=96, max_tokens=80, depth=3
    )
    samplers = runner._sampling.samplers
    parts = [runner._rows, runner._lanes, samplers, runner, *runner._slots]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for part in parts
        for name in getattr(part, "__slots__", None) or vars(part)
        if name not in ("_pinned", "_host_home_R", "_extra")  # the host's
        and isinstance(tensor := getattr(part, name, None), torch.Tensor)
    }
    expected = startup.state_bytes(asked, spec, torch.float32)
    assert expected == pytest.approx(sum(storages.values()), abs=16 * 3 + 4)
    large = Settings(device="cpu", max_num_seqs=1024, max_batch_tokens=8192, max_model_len=131072, depth=3)
    assert startup.state_bytes(large, spec, torch.bfloat16) > SLACK_BYTES
    less = cache_blocks(facts(), 0.9, 2 << 20, 16) - cache_blocks(facts(state=64 << 20), 0.9, 2 << 20, 16)
    assert less == 32
    with pytest.raises(DeviceMemoryError, match="lower max_num_seqs or max_model_len"):
        cache_blocks(facts(total=24 * GIB, state=5 * GIB), 0.97, 2 << 20, 512)


def test_memory_that_runs_out_while_a_runner_is_built_is_told(monkeypatch):
    """In attention's scratch memory, in the cache, in the state of rows, and as graphs are captured."""
    asked = Settings(device="cpu", dtype="float32", max_num_seqs=4, max_batch_tokens=16, max_model_len=96)
    spec = spec_from_config(named_config("tiny"))
    model = build(spec, torch.float32, "cpu")
    for target in model.targets().values():
        target.write(torch.zeros(target.shape))
    here = torch.device("cpu")

    def runs_out(*args, **options):
        raise torch.OutOfMemoryError("made up")

    with monkeypatch.context() as patch:
        patch.setattr(startup, "_reserve", runs_out)
        with pytest.raises(DeviceMemoryError, match="scratch memory for 4 rows"):
            startup.measure(model, ReferenceAttention(), asked, torch.float32, None)

    allocate = KVCache.allocate
    patches = {
        "CudaStreams": lambda device: EagerStreams(), "_load": lambda *_: model, "measure": lambda *_: facts(),
        "attention_backend": lambda *_, **__: ReferenceAttention(), "open_libraries": lambda *_: None,
        "finish_compiling": lambda *_: None, "cache_blocks": lambda *_: 8,
    }  # fmt: skip
    for name, made in patches.items():
        monkeypatch.setattr(startup, name, made)
    for name in ("current_device", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(KVCache, "allocate", lambda *args: allocate(*args[:-1], here))
    resolved = Resolved(asked, {}, Facts("cuda", "", 1, 0, 96, 0, 1))
    startup.start(spec, None, resolved).close()
    for place, name, told in (
        (KVCache, "allocate", "a KV cache of"), (Lanes, "allocate", "state of 4 rows at depth 2"),
        (EagerStreams, "pinned", "pinned memory of the host"), (CudaRunner, "_decode", "state of 4 rows"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(place, name, runs_out)
            with pytest.raises(DeviceMemoryError, match=told) as caught:
                startup.start(spec, None, resolved)
            assert "lower" in caught.value.hint


def test_a_slot_sends_in_one_copy_grows_and_fetches():
    streams = EagerStreams()
    slot = Slot(streams, 64, torch.arange(8), 0)
    slot.take(Timekeeper(streams, 1).begin(idle=True))
    with pytest.raises(AssertionError, match="taken before"):
        slot.take(slot.moments)
    arrays = {"a": np.arange(50), "b": np.ones((3, 2), np.float32), "none": np.zeros(0, np.int32)}
    views = slot.send(arrays)
    streams.wait("compute", slot.moments.ready)
    for name, array in arrays.items():
        assert views[name].shape == array.shape and np.array_equal(views[name].numpy(), array)
    slot.fetch(3, Drawn(None))
    slot.wait()
    assert slot.tokens(3) == [0, 1, 2]


def test_uneven_spans_are_those_whose_longest_stands_out() -> None:
    assert not is_uneven(np.array([], dtype=np.int32)) and not is_uneven(np.array([7]))
    assert not is_uneven(np.array([1000, 1010, 990])) and is_uneven(np.array([100, 400, 250]))
