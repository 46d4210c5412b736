"""API keys as they are read and compared, without a server."""

import pytest

from tandem.errors import SettingError
from tandem.serve.guard import KeyGuard, read_keys


def test_a_file_holds_one_key_a_line_and_comments(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n  # theirs, indented\n\n sk-one \nsk-two#2\n")
    assert read_keys(["sk-zero", " "], str(file)) == ("sk-zero", "sk-one", "sk-two#2")


def test_a_file_without_keys_or_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "keys").write_text("# nothing\n")
    for name in ("keys", "absent"):
        with pytest.raises(SettingError, match=name):
            read_keys([], str(tmp_path / name))


def test_only_whole_keys_are_known():
    guard = KeyGuard(lambda *_: None, ["sk-one", "sk-two"])
    assert guard.knows("sk-one") and guard.knows("sk-two")
    assert not any(guard.knows(key) for key in ("", "sk-on", "sk-one ", "SK-ONE", "sk-three", "\ud800"))
