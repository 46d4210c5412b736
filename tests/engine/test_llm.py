"""LLM: results in order, failures alone, the same tokens at every depth (C02), weights replaced in place (C36)."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tandem import LLM, SamplingParams
from tandem.config import Settings
from tandem.engine import llm as llm_module
from tandem.engine.blocking import BlockingEngine
from tandem.errors import (
    ContextLengthError,
    DeviceMemoryError,
    EngineDeadError,
    ModelError,
    RequestError,
    SettingError,
    WeightsError,
)
from tandem.request import Constraint


def tokens(results) -> list[list[int]]:
    return [result.completions[0].token_ids for result in results]


def mixed_work(num_logits: int, count: int = 32) -> tuple[list[list[int]], list[SamplingParams]]:
    """Distinct prompts of 1..97 tokens, 1..64 tokens wanted."""
    dice = random.Random(1)
    prompts = [
        [number + 3] + [dice.randrange(3, num_logits) for _ in range(dice.randint(0, 96))] for number in range(count)
    ]
    return prompts, [SamplingParams(temperature=0.0, max_tokens=dice.randint(1, 64), logprobs=1) for _ in prompts]


def check_c02(results, alone, params, eos: set[int]) -> None:
    for one, reference, asked in zip(results, alone, params, strict=True):
        answer, expected = one.completions[0], reference.completions[0]
        assert answer.token_ids == expected.token_ids and len(answer.logprobs) == len(answer.token_ids)
        assert len(answer.token_ids) <= asked.max_tokens
        assert not eos & set(answer.token_ids[:-1]), "a token behind the end of sequence"
        for got, wanted in zip(answer.logprobs, expected.logprobs, strict=True):
            assert abs(got.logprob - wanted.logprob) < 1e-3


def test_c02_same_tokens_with_steps_in_flight_on_the_null_runner() -> None:
    settings = {"device": "null", "max_num_seqs": 16, "max_batch_tokens": 64, "kv_cache_memory": 34 * 16 * 4096 * 4}
    settings |= {"max_model_len": 512}
    with LLM(**settings, depth=1) as one_by_one:
        prompts, params = mixed_work(one_by_one.card.num_logits)
        alone = [one_by_one.generate(p, own, progress=False)[0] for p, own in zip(prompts, params, strict=True)]
    for depth in (2, 3):
        with LLM(**settings, depth=depth) as together:
            check_c02(together.generate(prompts, params, progress=False), alone, params, {2})
            order = list(range(len(prompts)))
            random.Random(depth).shuffle(order)
            shuffled = together.generate([prompts[i] for i in order], [params[i] for i in order], progress=False)
            assert tokens(shuffled) == [alone[i].completions[0].token_ids for i in order]
            assert together.statistics()["steps"] < sum(map(len, tokens(shuffled))), "they were to run together"


def test_c02_same_tokens_with_steps_in_flight_on_the_cpu() -> None:
    settings = {"model": "tiny", "load_format": "random", "max_num_seqs": 8, "max_batch_tokens": 48, "threads": 1}
    settings |= {"kv_cache_memory": "1MiB"}
    with LLM(**settings, depth=1, prefix_cache=False) as one_by_one:
        prompts, params = mixed_work(512, 16)
        alone = [one_by_one.generate(p, own, progress=False)[0] for p, own in zip(prompts, params, strict=True)]
    with LLM(**settings, depth=2) as together:
        check_c02(together.generate(prompts, params, progress=False), alone, params, set())
    with BlockingEngine(Settings.from_dict({**settings, "depth": 3})) as late:
        streams = [late.submit(p, own) for p, own in zip(prompts[:8], params, strict=False)]
        streams[0].get(5.0)  # half of them come when the others are under way
        time.sleep(0.02)
        streams += [late.submit(p, own) for p, own in zip(prompts[8:], params[8:], strict=True)]
        got = [[t for update in stream for t in update.token_ids] for stream in streams]
    expected = tokens(alone)
    assert got[1:] == expected[1:] and expected[0][-len(got[0]) :] == got[0]


@pytest.fixture(scope="module")
def null():
    with LLM(device="null", kv_cache_memory="64MiB") as llm:
        yield llm


def test_results_come_in_order_and_a_bad_prompt_fails_alone(null: LLM) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    prompts = ["short", [9999], "x" * 300, [], "last", [4] * 40_000]
    results = null.generate(prompts, params, progress=False)
    assert [result.error is None for result in results] == [True, False, True, False, True, False]
    assert isinstance(results[5].error, ContextLengthError) and results[1].completions == []
    assert results[0].prompt == "short" and results[2].prompt == "x" * 300 and results[1].prompt_token_ids == [9999]
    for result in (results[0], results[2], results[4]):
        assert len(result.completions[0].token_ids) == 5 and result.completions[0].finish_reason == "length"
    assert null.generate("short", params, progress=False)[0].completions == results[0].completions
    assert tokens(null.generate([7, 8, 9], params, progress=False)) == tokens(
        null.generate([[7, 8, 9]], params, progress=False)
    )
    assert null.generate([], progress=False) == []


def test_params_one_for_all_or_one_each(null: LLM) -> None:
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    assert [len(t) for t in tokens(null.generate(["a", "b", "c"], each, progress=False))] == [1, 2, 3]
    with pytest.raises(RequestError, match="3 prompts and 2"):
        null.generate(["a", "b", "c"], each[:2], progress=False)
    assert null.default_params(max_tokens=4) == SamplingParams(max_tokens=4)


def test_n_logprobs_and_prompt_logprobs(null: LLM) -> None:
    params = SamplingParams(max_tokens=4, n=3, seed=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    result = null.generate([20, 21, 22, 23], params, progress=False)[0]
    assert [answer.index for answer in result.completions] == [0, 1, 2]
    assert all(len(answer.logprobs) == 4 for answer in result.completions)
    assert [entry.token for entry in result.prompt_logprobs] == [20, 21, 22, 23]
    assert result.prompt_logprobs[0].logprob is None and result.prompt_logprobs[1].logprob < 0


def test_chat_takes_one_conversation_or_several(null: LLM) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    one = [{"role": "user", "content": "hi"}]
    single = null.chat(one, params, progress=False)
    several = null.chat([one, [*one, {"role": "assistant", "content": "yes"}, *one]], params, progress=False)
    assert len(single) == 1 and len(several) == 2 and tokens(single)[0] == tokens(several)[0]
    mixed = null.chat([one, [{"role": "user"}], one], params, progress=False)
    assert [result.error is None for result in mixed] == [True, False, True] and tokens(mixed[::2]) == tokens(
        single
    ) * 2


def test_grammars_bind_their_own_request_only(null: LLM) -> None:
    plain = SamplingParams(max_tokens=12, ignore_eos=True)
    params = [
        plain,
        SamplingParams(constraint=Constraint("choice", '["yes", "perhaps"]')),
        SamplingParams(constraint=Constraint("regex", "[ab]{3}c"), max_tokens=9, n=2),
        SamplingParams(constraint=Constraint("regex", "([")),
        plain,
    ]
    results = null.generate(["same"] * 5, params, progress=False)
    assert results[1].completions[0].text in ("yes", "perhaps") and results[1].completions[0].finish_reason == "stop"
    assert all(re.fullmatch("[ab]{3}c", answer.text) for answer in results[2].completions)
    assert results[3].error is not None and results[3].error.code == "invalid_value"
    assert tokens([results[0]]) == tokens([results[4]]) == tokens(null.generate("same", plain, progress=False))


def test_an_interrupt_leaves_an_idle_engine(null: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    collected = 0
    inner = null._loop.runner.collect

    def collect(ticket):
        nonlocal collected
        collected += 1
        if collected == 5:
            os.kill(os.getpid(), signal.SIGINT)  # a Ctrl-C inside a turn
        return inner(ticket)

    monkeypatch.setattr(null._loop.runner, "collect", collect)
    with pytest.raises(KeyboardInterrupt):
        null.generate(["a"] * 20, SamplingParams(max_tokens=1000, ignore_eos=True), progress=False)
    assert collected < 20 and null._loop.idle and not null._front._answers
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    null._loop.check()
    assert len(tokens(null.generate("a", SamplingParams(max_tokens=3, ignore_eos=True), progress=False))[0]) == 3


def test_a_dead_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_fakes import make_fake_loop

    def make_loop(settings, mailbox, *, offline):
        assert offline, "nobody reads along"
        return make_fake_loop({"fail_at_step": 3}, mailbox)

    monkeypatch.setattr(llm_module, "make_loop", make_loop)
    with LLM() as llm:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="the device is gone"):
                llm.generate([[5]], SamplingParams(max_tokens=9), progress=False)


def test_settings_are_checked_by_name() -> None:
    with pytest.raises(SettingError, match="no setting") as caught:
        LLM(device="null", max_num_sequences=4)
    assert "max_num_seqs" in caught.value.hint
    with pytest.raises(WeightsError):
        LLM("/nowhere/at/all", device="cpu")
    with pytest.raises(DeviceMemoryError, match="max_model_len is 32768"):
        LLM(device="null", max_model_len=32768, kv_cache_memory="64MiB")
    with pytest.raises(DeviceMemoryError, match="free"):
        LLM("tiny", device="cpu", load_format="random", kv_cache_memory="500TB")
    with LLM(device="null", dtype="auto", max_num_seqs="auto", kv_cache_memory="64MiB") as llm:
        assert llm.card.max_length == 4096 and "what the KV cache holds" in "\n".join(llm.lines())


def write_tiny(folder: Path, seed: int, hidden: int = 64) -> str:
    """A Llama of two layers with random weights, as a Hugging Face folder."""
    import torch
    from safetensors.torch import save_file

    config = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": hidden, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    dice = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> "torch.Tensor":
        return torch.randn(*shape, generator=dice) * 0.2

    tensors = {name: draw(512, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = 1 + draw(hidden)
    for layer in range(2):
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 2, hidden),
            "self_attn.v_proj": (hidden // 2, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (128, hidden), "mlp.up_proj": (128, hidden), "mlp.down_proj": (hidden, 128),
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }.items():  # fmt: skip
            tensors[f"model.layers.{layer}.{name}.weight"] = draw(*shape)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def assert_same(result, expected) -> None:
    """Equal tokens, and log-probabilities equal up to rounding: a prefix hit makes other matrix shapes."""
    answer, wanted = result.completions[0], expected.completions[0]
    assert answer.token_ids == wanted.token_ids
    for got, other in zip(answer.logprobs, wanted.logprobs, strict=True):
        assert abs(got.logprob - other.logprob) < 1e-3


def test_c36_new_weights_never_meet_the_old_cache(tmp_path: Path) -> None:
    first, second = write_tiny(tmp_path / "first", 1), write_tiny(tmp_path / "second", 2)
    other_shape = write_tiny(tmp_path / "other", 3, hidden=32)
    settings = {"kv_cache_memory": "1MiB", "threads": 1, "max_num_seqs": 4}
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)
    prompt = list(range(5, 70))
    with LLM(second, **settings) as fresh:
        expected = fresh.generate(prompt, params, progress=False)[0]
    with LLM(first, **settings) as llm:
        before = llm.generate(prompt, params, progress=False)[0]
        assert llm.generate(prompt, params, progress=False)[0].cached_tokens >= 48
        for bad in (other_shape, str(tmp_path / "nothing")):
            with pytest.raises((ModelError, WeightsError)):
                llm.update_weights(bad)
        broken = Path(write_tiny(tmp_path / "broken", 4))
        broken.joinpath("model.safetensors").write_bytes(broken.joinpath("model.safetensors").read_bytes()[:5000])
        with pytest.raises(WeightsError):
            llm.update_weights(str(broken))
        again = llm.generate(prompt, params, progress=False)[0]
        assert_same(again, before)
        llm.update_weights(second)
        after = llm.generate(prompt, params, progress=False)[0]
        assert_same(after, expected)
        assert after.cached_tokens == 0 and tokens([after]) != tokens([before])
        assert llm.generate(prompt, params, progress=False)[0].cached_tokens >= 48


def test_c36_what_runs_when_weights_are_swapped_finishes_on_the_old_ones(tmp_path: Path) -> None:
    first, second = write_tiny(tmp_path / "first", 1), write_tiny(tmp_path / "second", 2)
    settings = {"kv_cache_memory": "1MiB", "threads": 1, "max_num_seqs": 4}
    params = SamplingParams(temperature=0.0, max_tokens=100, logprobs=1)
    prompt = list(range(5, 25))
    answers = []
    for weights in (first, second):
        with LLM(weights, **settings) as alone:
            answers += tokens(alone.generate(prompt, params, progress=False))
    with BlockingEngine(first, **settings) as engine:
        old = engine.submit(prompt, params)
        got = list(old.get(5.0).token_ids)
        engine.update_weights(second)
        new = engine.submit(prompt, params)
        got += [token for update in old for token in update.token_ids]
        assert got == answers[0]
        assert [token for update in new for token in update.token_ids] == answers[1] != answers[0]
