"""Every family against transformers: same logits, same greedy tokens, whole or in chunks, alone or together."""

from typing import Any

import pytest
import torch
from paged_driver import Paged, load_saved, make_batch

from tandem.models.decoder import Decoder
from tandem.models.registry import spec_from_config

BASE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9, "num_hidden_layers": 4}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "head_dim": 20}),
    "mistral": ("Mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, "num_experts": 5, "norm_topk_prob": True, **MIXTURE}),
    "qwen3_moe-sparse": ("Qwen3Moe", {"head_dim": 16, "num_experts": 4, "mlp_only_layers": [1], **MIXTURE}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2", {**GEMMA, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0}),
    "gemma3": (
        "Gemma3Text",
        {
            **GEMMA, "num_key_value_heads": 1, "final_logit_softcapping": 5.0, "layer_types": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
}  # fmt: skip


def reference_model(case: str) -> Any:
    import transformers

    name, changes = CASES[case]
    values = {**BASE, **changes, "attn_implementation": "eager"}
    if name == "Gemma3Text":
        values |= {"sliding_window_pattern": 2}
        values.pop("layer_types")
    config = getattr(transformers, f"{name}Config")(**values)
    torch.manual_seed(3)
    kind = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[Any, Decoder]]:
    return {}


def pair_of(case: str, pairs: dict[str, tuple[Any, Decoder]]) -> tuple[Any, Decoder]:
    if case not in pairs:
        reference = reference_model(case)
        pairs[case] = (reference, load_saved(reference))
    return pairs[case]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, pairs: dict[str, tuple[Any, Decoder]]) -> None:
    reference, model = pair_of(case, pairs)
    prompt = prompt_of(37)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    logits = Paged(model).step({0: (0, prompt)}, every=True)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers_in_any_chunks(case: str, pairs: dict[str, tuple[Any, Decoder]]) -> None:
    reference, model = pair_of(case, pairs)
    prompt = prompt_of(21, seed=1)
    expected = reference_greedy(reference, prompt, 32)
    for chunk in (100, 16, 5, 1):
        assert Paged(model).greedy(0, prompt, 32, chunk) == expected, chunk


@pytest.mark.parametrize("case", ["llama", "gemma3", "mixtral"])
def test_together_equals_alone(case: str, pairs: dict[str, tuple[Any, Decoder]]) -> None:
    """Three requests of different lengths; the third still prefills while the others decode."""
    _, model = pair_of(case, pairs)
    prompts = [prompt_of(length, seed=length) for length in (5, 18, 30)]
    alone = [Paged(model, 3).step({n: (0, prompt)})[0] for n, prompt in enumerate(prompts)]
    paged = Paged(model, 3)
    paged.step({0: (0, prompts[0][:-1]), 1: (0, prompts[1][:-1]), 2: (0, prompts[2][:12])})
    together = paged.step({0: (4, prompts[0][-1:]), 1: (17, prompts[1][-1:]), 2: (12, prompts[2][12:])})
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_counted(case: str, pairs: dict[str, tuple[Any, Decoder]]) -> None:
    reference, model = pair_of(case, pairs)
    assert model.spec.num_parameters == sum(p.numel() for p in reference.parameters())
    assert model.spec == spec_from_config(reference.config.to_dict())


@pytest.mark.parametrize("case", ["llama", "mixtral", "gemma3"])
def test_behind_the_last_attention_only_wanted_tokens_are_computed(
    case: str, pairs: dict[str, tuple[Any, Decoder]]
) -> None:
    model = pair_of(case, pairs)[1]
    seen: list[int] = []
    block: Any = model.blocks[-1]
    hook = block.feed_forward.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    driver, all_at_once = Paged(model), Paged(model)
    prompt = prompt_of(40)
    whole_TV = all_at_once.step({0: (0, prompt)}, every=True)
    with torch.inference_mode():
        for start, wanted in ((0, []), (17, [0, 5, 22])):
            tokens = prompt[start:] if wanted else prompt[start : start + 17]
            batch = make_batch({0: (start, tokens)}, driver.tables_SB, driver.block_size)
            batch.sampled_R = torch.tensor(wanted, dtype=torch.int64)
            hidden_RE = model(batch, driver.cache, driver.backend)
            assert hidden_RE.shape == (len(wanted), model.spec.hidden_size)
    hook.remove()
    assert seen == [40, 3]  # nothing at all where no token is wanted
    torch.testing.assert_close(model.logits(hidden_RE), whole_TV[[17, 22, 39]], rtol=1e-4, atol=1e-4)
