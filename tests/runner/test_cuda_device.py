"""The GPU runner on a GPU: no hidden synchronisation, the CPU's tokens in float32, times on the host's clock."""

import gc
import time

import pytest
import torch
from runner_drive import Drive, greedy

from tandem.attention.contract import KVCache
from tandem.attention.cpu import CpuAttention
from tandem.config import Facts, Settings
from tandem.models.registry import build, spec_from_config
from tandem.request import SamplingParams
from tandem.runner.cpu import CpuRunner
from tandem.runner.cuda import CudaRunner
from tandem.runner.device_sampling import GREEDY, PLAIN

pytestmark = pytest.mark.gpu

CONFIG = {
    "model_type": "llama", "vocab_size": 997, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
BLOCK_SIZE, MAX_LENGTH, NUM_BLOCKS = 16, 256, 256


def make(device, **how):
    """A runner with random weights: the same on every device."""
    spec = spec_from_config(CONFIG)
    model, twin = build(spec, torch.float32, device), build(spec, torch.float32, "cpu")
    torch.manual_seed(1)
    written = {
        name: torch.randn(target.shape) * (0.1 if len(target.shape) > 1 else 1.0)
        for name, target in twin.targets().items()
    }
    for name, target in model.targets().items():
        target.write(written[name])
    shape = (spec.num_layers, NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    cache = KVCache.allocate(*shape, torch.float32, torch.device(device))
    if device == "cpu":
        return CpuRunner(model, cache, CpuAttention(), num_rows=64, max_length=MAX_LENGTH, **how)
    from tandem.attention.triton import TritonAttention
    from tandem.runner.streams import CudaStreams

    place = torch.device("cuda", 0)
    return CudaRunner(
        model, cache, TritonAttention(place), CudaStreams(place), num_rows=64, max_length=MAX_LENGTH, max_tokens=512,
        **how,
    )  # fmt: skip


def requests(params_of, count):
    return [
        (f"r{i}", [(31 * i + 17 * j * j) % 997 for j in range(1 + (7 * i) % 90)], params_of(i)) for i in range(count)
    ]


def outputs_of(runner, asked, **how):
    driven = Drive(asked, 64, NUM_BLOCKS, BLOCK_SIZE, **how)
    return driven.run(runner), driven


def mixed(i):
    kinds = [
        greedy(24), greedy(9, logprobs=2, prompt_logprobs=1), SamplingParams(temperature=0.8, top_p=0.9, max_tokens=20),
        SamplingParams(temperature=1.1, top_k=30, repetition_penalty=1.2, max_tokens=18),
    ]  # fmt: skip
    return kinds[i % len(kinds)]


def test_float32_tokens_are_the_cpus_at_every_depth_with_and_without_graphs():
    asked = requests(lambda i: greedy(30), 20)
    cpu = make("cpu")
    expected, _ = outputs_of(cpu, asked)
    cpu.close()
    for depth, uses_graphs, chunk in ((1, True, None), (2, True, 40), (3, True, 17), (2, False, None)):
        outputs, driven = outputs_of(make("cuda", depth=depth, uses_graphs=uses_graphs), asked, chunk=chunk, join=0.5)
        assert outputs == expected, f"depth {depth}, graphs {uses_graphs}"
        assert driven.num_steady > 5


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_synchronises_but_at_home():
    for params_of in (lambda i: greedy(20), mixed):
        outputs_of(runner := make("cuda", depth=2), requests(params_of, 12))  # compiles
        runner = make("cuda", depth=2)
        runner.warm_up((GREEDY, PLAIN), 60.0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs, _ = outputs_of(runner, requests(params_of, 12), chunk=50, join=0.7)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(len(outputs[id]) == params.max_tokens for id, _, params in requests(params_of, 12))


def test_graphs_of_a_runner_that_is_gone_do_not_void_a_capture():
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.collect()  # nothing is left to look at: from here on any collection looks at all that comes
    try:
        outputs_of(gone := make("cuda", depth=2), requests(lambda i: greedy(4), 4))
        gone.itself = gone  # so that only a collection frees it
        runner = make("cuda", depth=2)
        gc.set_threshold(1, 1, 1)
        del gone
        runner.warm_up((GREEDY,), 2.0)
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    assert runner.statistics()["graphs"] > 0


def test_sampled_tokens_are_the_same_at_every_depth_and_with_graphs():
    asked = requests(mixed, 16)
    expected, _ = outputs_of(make("cuda", depth=1, uses_graphs=False), asked)
    for depth in (1, 2, 3):
        assert outputs_of(make("cuda", depth=depth), asked, preempt=0.02, seed=depth)[0] == expected


def test_times_are_in_order_on_the_hosts_clock():
    runner = make("cuda", depth=2)
    driven = Drive(requests(lambda i: greedy(60), 8), 64, NUM_BLOCKS, BLOCK_SIZE)
    tickets, last_s, seen = [], 0.0, 0
    while (plan := driven.plan()) is not None or tickets:
        if plan is not None:
            tickets.append(runner.submit(plan))
        if len(tickets) == 2 or plan is None:
            result = runner.collect(tickets.pop(0))
            now_s, times = time.perf_counter(), result.times
            assert times.submitted_s - 1e-3 <= times.began_s <= times.computed_s <= times.home_s <= now_s + 1e-4
            assert times.began_s >= last_s - 1e-6, "two steps on the compute stream overlap"
            last_s, seen = times.computed_s, seen + 1
            driven.commit(result)
    assert seen > 50


def test_started_with_random_weights_it_sizes_its_cache():
    from tandem.models.named import named_config
    from tandem.weights.source import locate

    source = locate("qwen3-0.6b", load_format="random", named_config=named_config)
    spec = spec_from_config(source.config)
    facts = Facts(
        "cuda", "gpu", 8, 1 << 30, spec.max_length, spec.num_parameters, spec.kv_bytes_per_token(2), "bfloat16"
    )
    settings = Settings(max_model_len=2048, max_num_seqs=16, max_batch_tokens=2048, gpu_memory_utilization=0.5)
    runner = CudaRunner.create(spec, source, settings.resolve(facts))
    total = torch.cuda.mem_get_info()[1]
    assert torch.cuda.memory_reserved() < 0.5 * total
    assert runner.facts.num_blocks * spec.kv_bytes_per_token(2) * 16 > 0.3 * total
    driven = Drive([("a", [1, 2, 3], greedy(8))], 16, 64, 16)
    assert len(driven.run(runner)["a"]) == 8


def test_a_second_slot_takes_no_second_set_of_graphs():
    taken = []
    for depth in (1, 2, 3):
        runner = make("cuda", depth=depth)
        runner.warm_up((GREEDY, PLAIN), 60.0)
        found = runner.statistics()
        taken.append((found["graphs"], found["graph_pool_bytes"]))
        runner.close()
    assert taken[0][0] > 10 and len({graphs for graphs, _ in taken}) == 1
    assert max(num_bytes for _, num_bytes in taken) <= 1.1 * taken[0][1], taken
