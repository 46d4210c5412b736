"""The CPU runner on a tiny random Llama: the as transformers says, at any depth, chunk, company or interruption."""

import random

import pytest
import torch
from runner_drive import Drive, greedy

from tandem.attention.choice import attention_backend
from tandem.attention.contract import KVCache
from tandem.errors import DeviceMemoryError, WeightsError
from tandem.models.registry import build, spec_from_config
from tandem.request import SamplingParams
from tandem.runner.cpu import CpuRunner, num_blocks_for
from tandem.weights.load import load
from tandem.weights.source import locate

LEFT: dict = {}  # rows that the last drive of a runner left, which no plan has told it yet
NUM_LOGITS, MAX_LENGTH, BLOCK_SIZE = 97, 96, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=NUM_LOGITS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=MAX_LENGTH, initializer_range=0.3, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    source = locate(str(folder))
    model = build(spec_from_config(source.config), torch.float32, "cpu")
    load(model, source)
    return model


@pytest.fixture
def make(model):
    runners = []

    def make(depth=1, num_rows=8, num_blocks=96, model=model):
        spec = model.spec
        cache = KVCache.allocate(
            spec.num_layers, num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, torch.float32,
            torch.device("cpu"),
        )  # fmt: skip
        runner = CpuRunner(
            model, cache, attention_backend("cpu", "cpu"), num_rows=num_rows, max_length=MAX_LENGTH, depth=depth
        )
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()


def requests(count, make_params, seed=0):
    rng = random.Random(seed)
    return [
        (f"r{i}", [rng.randrange(NUM_LOGITS) for _ in range(rng.randint(1, 30))], make_params(i)) for i in range(count)
    ]


def tokens_of(runner, asked, **how):
    left = LEFT.get(runner, [])
    drive = Drive(asked, runner.facts.num_rows, runner.facts.num_blocks, BLOCK_SIZE, departed=left, **how)
    outputs = drive.run(runner)
    LEFT[runner] = drive.departed
    return outputs, drive


def test_equals_transformers_greedy(folder, make):
    from transformers import LlamaForCausalLM

    asked = requests(6, lambda i: greedy(24))
    outputs, _ = tokens_of(make(depth=2), asked, chunk=7)
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for id, prompt, params in asked:
        ids = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=params.max_tokens, do_sample=False,
        )  # fmt: skip
        assert outputs[id] == ids[0, len(prompt) :].tolist()


def mixed_params(i):
    kinds = [
        greedy(20),
        SamplingParams(temperature=0.9, top_p=0.9, seed=i, max_tokens=15),
        SamplingParams(temperature=1.2, top_k=20, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=18),
        greedy(12, logit_bias=((5, 3.0),), min_tokens=4, presence_penalty=0.7),
    ]
    return kinds[i % len(kinds)]


def test_depth_chunks_company_and_preemption_change_no_token(make):
    asked = requests(8, mixed_params)
    alone = {}
    for request in asked:
        alone |= tokens_of(make(), [request])[0]
    for depth, chunk, preempt in ((1, None, 0.0), (2, 5, 0.0), (3, 3, 0.08), (4, 1, 0.05), (2, None, 0.1)):
        outputs, drive = tokens_of(make(depth), asked, chunk=chunk, preempt=preempt, join=0.5, seed=depth)
        assert outputs == alone, f"depth {depth}, chunk {chunk}"
        assert (drive.num_preempted > 0) == (preempt > 0)


def test_same_seed_same_tokens_other_seed_other_tokens(make):
    prompt = [4, 8, 15, 16, 23, 42]
    asked = [(f"n{i}", prompt, SamplingParams(seed=seed, max_tokens=16)) for i, seed in enumerate((7, 7, 8))]
    outputs, _ = tokens_of(make(depth=2), asked)
    assert outputs["n0"] == outputs["n1"] != outputs["n2"]


def test_c09_prompt_logprobs_equal_full_logits_in_any_chunks(model, folder, make):
    from transformers import LlamaForCausalLM

    prompt = requests(1, lambda i: greedy(3), seed=5)[0][1] * 2
    reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor([prompt])).logits[0], -1)
    for chunk in (None, 4):
        params = greedy(3, prompt_logprobs=3, logprobs=2)
        _, drive = tokens_of(make(depth=2), [("p", prompt, params), ("q", prompt[:5], greedy(9))], chunk=chunk)
        stream = drive.sequences[0]
        assert [entry.token for entry in stream.prompt_logprobs] == prompt[1:]
        for position, entry in enumerate(stream.prompt_logprobs):
            assert entry.logprob == pytest.approx(expected[position, entry.token].item(), abs=1e-4)
            assert len(entry.top) == 3 and entry.top[0][1] >= entry.top[1][1]
        assert [entry.token for entry in stream.logprobs] == stream.output
        assert all(entry.rank == 1 and len(entry.top) == 2 for entry in stream.logprobs)
        assert stream.logprobs[0].logprob == pytest.approx(expected[-1].max().item(), abs=1e-4)


def test_a_row_that_is_not_finite_fails_alone(model, make):
    class Poisoned(torch.nn.Module):
        spec, logits = model.spec, model.logits

        def forward(self, batch, cache, backend):
            hidden = model(batch, cache, backend).clone()
            ids = batch.ids_T if batch.sampled_R is None else batch.ids_T[batch.sampled_R]
            hidden[ids == 13] = torch.nan
            return hidden

    asked = [("good", [1, 2, 3], greedy(8)), ("bad", [5, 13], greedy(8)), ("fine", [7], greedy(8))]
    outputs, drive = tokens_of(make(depth=2, model=Poisoned()), asked)
    assert "not finite" in drive.sequences[1].error and outputs["bad"] == []
    assert outputs["good"] == tokens_of(make(), asked[:1])[0]["good"]


def test_a_raising_step_raises_at_collect_and_the_next_one_works(model, make):
    class Raising(torch.nn.Module):
        spec, logits, broken = model.spec, model.logits, True

        def forward(self, *args):
            if self.broken:
                raise ValueError("no luck")
            return model(*args)

    module = Raising()
    runner = make(model=module)
    drive = Drive([("a", [1, 2], greedy(2))], 8, 96, BLOCK_SIZE)
    plan = drive.plan()
    with pytest.raises(ValueError, match="no luck"):
        runner.collect(runner.submit(plan))
    module.broken = False
    plan.departures, plan.step = [plan.arrivals[0].row], plan.step
    assert len(runner.collect(runner.submit(plan)).tokens) == 1


def test_block_copies_come_before_the_step(make):
    """The KV of a prompt, copied to other blocks, is as good as the original."""
    from tandem.plan import Arrival, Span, StepPlan

    runner, prompt = make(), [3, 1, 4, 1, 5, 9]
    first = StepPlan(0, [Span("a", 0, 0, 6, [1, 2], True)], [Arrival("a", 0, prompt, 6, greedy(4))])
    (token,) = runner.collect(runner.submit(first)).tokens
    fork = StepPlan(
        1, [Span("b", 1, 5, 1, [7, 8], True)], [Arrival("b", 1, prompt, 6, greedy(4), cached=5)],
        block_copies=[(1, 7), (2, 8)],
    )  # fmt: skip
    assert runner.collect(runner.submit(fork)).tokens == [token]


def test_times_are_in_order_and_depth_is_kept(make):
    runner = make(depth=2)
    drive = Drive([("a", [1, 2], greedy(6))], 8, 96, BLOCK_SIZE)
    tickets = [runner.submit(drive.plan()), runner.submit(drive.plan())]
    assert [ticket.slot for ticket in tickets] == [0, 1]
    with pytest.raises(AssertionError, match="depth"):
        runner.submit(drive.plan())
    times = runner.collect(tickets[0]).times
    assert 0 < times.submitted_s <= times.ready_s <= times.began_s < times.computed_s <= times.home_s
    runner.collect(tickets[1])


def test_reload_replaces_weights_and_a_failed_one_changes_nothing(folder, tmp_path, make):
    from transformers import LlamaForCausalLM

    asked = [("a", [1, 2, 3], greedy(12))]
    runner = make()
    before, _ = tokens_of(runner, asked)
    broken = tmp_path / "broken"
    other = LlamaForCausalLM.from_pretrained(folder)
    torch.nn.init.normal_(other.lm_head.weight)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(WeightsError):
        broken.mkdir()
        (broken / "config.json").write_text((folder / "config.json").read_text())
        runner.reload(locate(str(broken)))
    assert tokens_of(runner, [("b", *asked[0][1:])])[0]["b"] == before["a"]
    runner.reload(locate(str(tmp_path / "other")))
    assert tokens_of(runner, [("c", *asked[0][1:])])[0]["c"] != before["a"]


def test_blocks_from_memory(model):
    block_bytes = 2 * 2 * 2 * 8 * 4 * 16
    assert num_blocks_for(model.spec, 10 * block_bytes + 5, 16, torch.float32) == 10
    with pytest.raises(DeviceMemoryError, match=str(block_bytes)):
        num_blocks_for(model.spec, block_bytes - 1, 16, torch.float32)


@pytest.mark.model
def test_created_from_the_embedded_model():
    from tandem.config import Facts, Settings

    source = locate(None)
    spec = spec_from_config(source.config)
    facts = Facts("cpu", "test", 1, 1 << 30, spec.max_length, spec.num_parameters, spec.kv_bytes_per_token(4))
    settings = Settings(kv_cache_memory=64 << 20, max_num_seqs=4, max_model_len=128, depth=2, threads=1)
    runner = CpuRunner.create(spec, source, settings.resolve(facts))
    try:
        assert runner.facts.num_blocks == (64 << 20) // (spec.kv_bytes_per_token(4) * 16)
        assert runner.facts.max_length == 128 and runner.facts.phases_s["weights"] > 0
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(source.tokenizer_json)
        prompt = tokenizer.encode("The capital of France is", add_special_tokens=True).ids
        drive = Drive([("a", prompt, greedy(2)), ("b", prompt[:3], greedy(2))], 4, 64, 16)
        assert "Paris" in tokenizer.decode(drive.run(runner)["a"])
    finally:
        runner.close()


def test_weights_replaced_in_place_come_back_when_loading_fails(model, folder, monkeypatch):
    """As on a GPU, where graphs know the parameters' addresses."""
    from tandem.runner import startup

    places = [parameter.data_ptr() for parameter in model.parameters()]
    before = [parameter.clone() for parameter in model.parameters()]

    def breaks_off(module, source):
        next(iter(module.parameters())).data.zero_()
        raise WeightsError("the file ends early")

    with monkeypatch.context() as patch, pytest.raises(WeightsError):
        patch.setattr(startup, "load", breaks_off)
        startup.reload(model, locate(str(folder)))
    startup.reload(model, locate(str(folder)))
    for parameter, old, place in zip(model.parameters(), before, places, strict=True):
        assert torch.equal(parameter, old) and parameter.data_ptr() == place
