"""The GGUF reader: round trips through a converter (C32), block formats, damaged files, configs."""

import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints import LLAMA, RecordingModule, llama_tensors
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from gguf_files import SPECIALS, TEMPLATE, byte_level_tokenizer, with_bos, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, pre_tokenizers

from tandem.errors import WeightsError
from tandem.weights.gguf import read_gguf
from tandem.weights.gguf_tensors import dequantise, gguf_stored
from tandem.weights.load import load
from tandem.weights.source import locate

TEXTS = [
    "Hello world", " it's  1234567 o'clock\n\n  x", "déjà 你好🦙 \t\r\n", "<|im_start|>user\nhi<|im_end|>\n", "",
    "THEY'RE 3.14159", "ﬁ ½ ٣ Ⅷ", "a\u00a0b\u200dc",
]  # fmt: skip
DIGITS = [pre_tokenizers.Digits(individual_digits=True)]


def loaded(path: Path, tensors, *, tied: bool = False) -> RecordingModule:
    module = RecordingModule({name: tuple(t.shape) for name, t in tensors.items()}, tied=tied)
    load(module, locate(str(path)))
    return module


# The largest error of a block format, as a share of a block's largest value: half a step, and float16's rounding.
@pytest.mark.parametrize(("kind", "share"), [(Kind.F16, 6e-4), (Kind.Q8_0, 0.6 / 127), (Kind.Q4_0, 1 / 8)])
def test_c32_tensors_equal_the_originals_within_the_format(tmp_path: Path, kind: Kind, share: float) -> None:
    tensors = llama_tensors()
    module = loaded(write_gguf(tmp_path / "m.gguf", tensors, LLAMA, kind), tensors)
    for name, tensor in tensors.items():
        found = module.value(name).float()
        if tensor.dim() == 1:
            assert torch.equal(found, tensor)
            continue
        limit = tensor.view(-1, 32).abs().amax(1, keepdim=True) * share
        assert ((found - tensor).view(-1, 32).abs() <= limit + 1e-6).all(), name


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_c32_key_rows_are_reordered_by_kv_head(tmp_path: Path, kv_heads: int) -> None:
    config = LLAMA | {"num_key_value_heads": kv_heads}
    tensors = llama_tensors(config)
    module = loaded(write_gguf(tmp_path / "m.gguf", tensors, config), tensors)
    assert all(torch.equal(module.value(name), tensor) for name, tensor in tensors.items())


def test_c32_other_architectures_keep_their_row_order(tmp_path: Path) -> None:
    tensors = llama_tensors()
    path = write_gguf(tmp_path / "m.gguf", tensors, LLAMA, architecture="qwen2")
    assert locate(str(path)).config["model_type"] == "qwen2"
    module = loaded(path, tensors)
    assert all(torch.equal(module.value(name), tensor) for name, tensor in tensors.items())


def test_c32_without_an_output_matrix_the_head_is_tied(tmp_path: Path) -> None:
    tensors = llama_tensors(head=False)
    path = write_gguf(tmp_path / "m.gguf", tensors, LLAMA)
    assert locate(str(path)).config["tie_word_embeddings"] is True
    loaded(path, tensors, tied=True)
    with pytest.raises(WeightsError, match=r"missing \(1\): lm_head.weight"):
        loaded(path, llama_tensors())


@pytest.mark.parametrize("add_bos", [False, True])
def test_c32_tokenizer_and_template_of_the_file(tmp_path: Path, add_bos: bool) -> None:
    tokenizer = byte_level_tokenizer(DIGITS, use_regex=True)
    if add_bos:
        with_bos(tokenizer, SPECIALS[1])
    config = LLAMA | {"vocab_size": tokenizer.get_vocab_size()}
    source = locate(
        str(write_gguf(tmp_path / "m.gguf", llama_tensors(config), config, tokenizer=tokenizer, add_bos=add_bos))
    )
    own = Tokenizer.from_str(source.tokenizer_json)
    for text in TEXTS:
        for special in (False, True):
            ids = own.encode(text, add_special_tokens=special).ids
            assert ids == tokenizer.encode(text, add_special_tokens=special).ids, text
            assert own.decode(ids, skip_special_tokens=special) == tokenizer.decode(ids, skip_special_tokens=special)
    assert (source.bos_id, source.eos_id, source.pad_id, source.eos_ids) == (1, 2, 3, (2,))
    assert (source.bos_token, source.eos_token, source.pad_token) == ("<|im_start|>", "<|im_end|>", "<pad>")
    assert source.add_bos is add_bos and source.chat_template == TEMPLATE
    assert source.config["vocab_size"] == tokenizer.get_vocab_size()


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [
        ("gpt-2", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
        (
            "qwen2",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        (
            "dbrx",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ],
)
def test_c32_splitting_rules(tmp_path: Path, pre: str, pattern: str) -> None:
    tokenizer = byte_level_tokenizer([pre_tokenizers.Split(Regex(pattern), "isolated")])
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA, tokenizer=tokenizer, pre=pre)
    own = Tokenizer.from_str(locate(str(path)).tokenizer_json)
    for text in TEXTS[:6]:
        assert own.encode(text).ids == tokenizer.encode(text).ids, text


def test_unknown_splitting_rule_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(DIGITS, use_regex=True)
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA, tokenizer=tokenizer, pre="no-such-rule")
    with pytest.raises(WeightsError, match="'no-such-rule'"):
        locate(str(path))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_own_formulas_against_the_gguf_package(kind: str) -> None:
    values = np.random.default_rng(0).normal(size=(70, 512)).astype(np.float32)  # more than one chunk of blocks
    raw = quantize(values, Kind[kind])
    flat = torch.from_numpy(np.ascontiguousarray(raw).reshape(-1).view(np.uint8).copy())
    found = dequantise(flat, kind, values.shape).float().numpy()
    np.testing.assert_allclose(found, dequantize(raw, Kind[kind]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_other_types_through_the_gguf_package(kind: str) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    raw = np.random.default_rng(1).integers(0, 60, (6, 512 // block * block_bytes), dtype=np.uint8)
    found = dequantise(torch.from_numpy(raw.reshape(-1)), kind, (6, 512))
    np.testing.assert_array_equal(found.numpy(), dequantize(raw, Kind[kind]))


def test_k_quants_arrive_through_the_file(tmp_path: Path) -> None:
    tensors = llama_tensors()
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    raw = np.random.default_rng(1).integers(0, 60, (96, 144), dtype=np.uint8)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=Kind.Q4_K)
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (stored,) = gguf_stored(read_gguf(path))
    assert stored.name in tensors and stored.shape == (96, 256) and stored.dtype == "Q4_K"
    np.testing.assert_array_equal(stored.read().numpy(), dequantize(raw, Kind.Q4_K))


def test_c32_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA)
    raw = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", raw, at) == (0,)
    struct.pack_into("<I", raw, at, 4711)
    path.write_bytes(raw)
    with pytest.raises(WeightsError, match=r"blk\.1\.ffn_up\.weight.*4711"):
        locate(str(path))


def test_c32_unknown_tensor_is_left_over_by_name(tmp_path: Path, monkeypatch) -> None:
    tensors = llama_tensors()
    monkeypatch.setitem(__import__("gguf_files")._NAMES, "mystery", "mystery")
    path = write_gguf(tmp_path / "m.gguf", tensors | {"mystery.weight": torch.ones(4)}, LLAMA)
    with pytest.raises(WeightsError, match=r"left over \(1\): mystery.weight"):
        loaded(path, tensors)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory) -> Path:
    config = LLAMA | {"vocab_size": 320}
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(
        folder / "m.gguf",
        llama_tensors(config),
        config,
        Kind.Q8_0,
        tokenizer=byte_level_tokenizer(DIGITS, use_regex=True),
    )


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 0.9999))
def test_truncated_files_are_refused(small_file: Path, tmp_path: Path, cut: float) -> None:
    raw = small_file.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(raw[: int(len(raw) * cut)])
    with pytest.raises(WeightsError, match=r"cut\.gguf"):
        read_gguf(path)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 12000), value=st.integers(0, 255))
def test_damaged_headers_never_crash(small_file: Path, tmp_path: Path, at: int, value: int) -> None:
    raw = bytearray(small_file.read_bytes())
    raw[at] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    try:
        source = locate(str(path))
        list(gguf_stored(read_gguf(path)))
    except WeightsError:
        return
    assert source.kind == "gguf"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"GGML" + bytes(40), "no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "claims 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "1152921504606846976 metadata pairs"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62) + bytes(40), "claims 4611686018427387904 bytes"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 1 << 60) + bytes(40), "an array"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 60) + bytes(40), "an array"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77) + bytes(40), "value type 77"),
        (b"", "is empty"),
    ],
)
def test_bad_headers_teach(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(WeightsError, match=words):
        read_gguf(path)


@pytest.mark.model
def test_the_embedded_model_is_read_in_under_two_seconds() -> None:
    source = locate(None)
    if source.kind != "gguf":
        pytest.skip("the embedded model came from the hub here")
    best = float("inf")
    for _ in range(2):  # processor time, on one thread throughout: other work may hold the cores
        started = time.process_time()
        parsed = read_gguf(source.path)
        num_parameters = sum(stored.read().numel() for stored in gguf_stored(parsed))
        best = min(best, time.process_time() - started)
    assert num_parameters == 134_515_008
    assert best < 2.0, f"{best:.2f} s on {os.cpu_count()} cores"
