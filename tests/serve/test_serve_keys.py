"""API keys as they are read and compared, without a server."""

import httpx
import pytest
from serve_drive import Process

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
    assert (guard.number_of("sk-one"), guard.number_of("sk-two")) == (0, 1)
    assert all(guard.number_of(key) is None for key in ("", "sk-on", "sk-one ", "SK-ONE", "sk-three", "\ud800"))


def test_a_key_that_no_client_can_send_is_refused_at_the_start(tmp_path):
    with pytest.raises(SettingError, match="number 2 holds control characters"):
        read_keys(["sk-one", "sk\ttwo"], None)
    (tmp_path / "keys").write_bytes("sk-ü".encode("latin-1"))
    with pytest.raises(SettingError, match="UTF-8"):
        read_keys([], str(tmp_path / "keys"))
    (tmp_path / "keys").write_bytes("\ufeffsk-one\n".encode())
    assert read_keys([], str(tmp_path / "keys")) == ("sk-one",)


def test_keys_of_any_letters_open_the_door():
    """Clients send them as UTF-8; nearly the same letters, or the same in Latin-1, do not."""
    key = "schlüssel-鍵"
    with Process(keys=(key, "plain"), max_model_len=512) as server:

        def status(shown: bytes, name: str = "authorization") -> int:
            return httpx.get(server.url + "/v1/models", headers=[(name.encode(), shown)]).status_code

        assert status(f"Bearer {key}".encode()) == status(key.encode(), "x-api-key") == status(b"Bearer plain") == 200
        for wrong in (
            "Bearer schlussel-鍵".encode(),
            "Bearer schlüssel".encode("latin-1"),
            b"Bearer \xff\xfe",
            b"Bearer",
        ):
            assert status(wrong) == 401
