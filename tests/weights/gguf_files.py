"""A converter from a Hugging Face Llama to GGUF, written with the gguf package, for the tests only."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIALS = ["<unk>", "<|im_start|>", "<|im_end|>", "<pad>"]
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's 12345 o'clock, isn't it?",
    "def main(argument: int) -> None:\n    print('hello world')\n\n\treturn 2026",
    "déjà vu, naïve café. Grüße aus Köln! 你好,世界 and emoji 🦙🚀 too",
] * 4


def byte_level_tokenizer(pre: list[Any], vocab_size: int = 320, *, use_regex: bool = False) -> Tokenizer:
    """A small trained BPE with chat tokens, splitting text by the given pre-tokenizers first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*pre, pre_tokenizers.ByteLevel(False, use_regex=use_regex)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[AddedToken(token, special=True) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def with_bos(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, inner = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{_NAMES[inner]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


def permute(array: np.ndarray, heads: int) -> np.ndarray:
    """Halves of a head's rotary pairs, as in Hugging Face, to pairs side by side, as in GGUF."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def llama3_freqs(config: Mapping[str, Any]) -> np.ndarray:
    scaling, d = config["rope_scaling"], config["head_dim"]
    low, high, original = (
        scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_max_position_embeddings"]
    )  # fmt: skip
    factors = []
    for i in range(0, d, 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (i / d)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def write_gguf(
    path: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    kind: Kind = Kind.F32,
    *,
    tokenizer: Tokenizer | None = None,
    pre: str = "smollm",
    add_bos: bool = False,
    architecture: str = "llama",
    extra: Mapping[str, Any] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    for key, value in (extra or {}).items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, pre, add_bos)
    if config.get("rope_scaling"):
        writer.add_tensor("rope_freqs.weight", llama3_freqs(config))
    heads = {"attn_q.": config["num_attention_heads"], "attn_k.": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        array, theirs = tensor.float().numpy(), gguf_name(name)
        for part, count in heads.items():
            if part in theirs and architecture == "llama":
                array = permute(array, count)
        stored = Kind.F32 if array.ndim == 1 else kind
        writer.add_tensor(theirs, np.ascontiguousarray(quantize(array, stored)), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre: str, add_bos: bool) -> None:
    content = json.loads(tokenizer.to_str())
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIALS else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(3)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
