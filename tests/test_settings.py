"""The settings table: the word "auto"."""

import dataclasses

import pytest

from tandem.cli.options import Parser, add_settings, option_name, settings_of
from tandem.config import AUTO, Facts, Settings
from tandem.errors import SettingError

NULLABLE = [f.name for f in dataclasses.fields(Settings) if f.default is None]


def test_auto_is_a_word_for_every_setting_that_is_found_out() -> None:
    assert {"dtype", "device", "attention", "max_num_seqs", "kv_cache_memory", "quantize"} <= set(NULLABLE)
    asked = dict.fromkeys(NULLABLE, AUTO)
    assert Settings.from_dict(asked) == Settings() == Settings(**asked)


@pytest.mark.parametrize("name", ["policy", "depth", "block_size", "prefix_cache"])
def test_auto_is_none_where_there_is_a_default(name: str) -> None:
    with pytest.raises(SettingError, match=name):
        Settings.from_dict({name: AUTO})


def test_auto_is_a_word_on_the_command_line_too() -> None:
    parser = Parser()
    add_settings(parser)
    words = [word for name in NULLABLE for word in (option_name(name), AUTO)]
    assert Settings.from_dict(settings_of(parser.parse_args(words))) == Settings()
    given = settings_of(parser.parse_args(["--dtype", "auto", "--max-num-seqs", "7"]))
    assert Settings.from_dict(given) == Settings(max_num_seqs=7)
    with pytest.raises(SystemExit):
        parser.parse_args(["--max-num-seqs", "many"])


def test_a_step_has_a_target_where_the_device_is_slow() -> None:
    def resolved(device: str, **asked: float) -> tuple[float | None, str]:
        facts = Facts(device, "a machine", 2, 1 << 33, 4096, 1 << 27, 1 << 10)
        found = Settings(device=device, **asked).resolve(facts)  # type: ignore[arg-type]
        return found.settings.target_step_ms, found.reasons["target_step_ms"]

    assert resolved("cpu")[0] == 200 and "long prompt" in resolved("cpu")[1]
    assert resolved("cuda")[0] == resolved("null")[0] == 0 and "off on cuda" in resolved("cuda")[1]
    facts = Facts("cpu", "a machine", 2, 1 << 33, 4096, 1 << 27, 1 << 10)
    found = [Settings(target_step_ms=asked).resolve(facts, offline=True).settings for asked in (None, 50.0)]
    assert [(one.target_step_ms, one.max_batch_tokens) for one in found] == [(0.0, 1024), (50.0, 1024)]
    assert resolved("cuda", target_step_ms=50) == (50, "asked") and resolved("cpu", target_step_ms=0) == (0, "asked")
    with pytest.raises(SettingError, match="target_step_ms is -1"):
        Settings(target_step_ms=-1)
    with pytest.raises(SettingError, match="target_step_ms is nan"):
        Settings(target_step_ms=float("nan"))
