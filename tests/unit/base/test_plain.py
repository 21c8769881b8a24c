"""Files and texts of strangers."""

from __future__ import annotations

import os

import pytest

from mpispeed.base.plain import hide_in_words, hide_secrets, printable, read_head, read_plain


def test_signs_that_do_not_show_are_escaped():
    assert printable("a\x1b[31m\n\u202eb\ud800\x00ü") == "a\\x1b[31m\\n\\u202eb\\ud800\\x00ü"
    assert printable("x" * 10, 4) == "xxxx..."
    assert printable("xxxx", 4) == "xxxx"


def test_only_ordinary_files_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert read_plain(tmp_path / "file", 5) == b"12345"
    assert read_plain(tmp_path / "link", 5, follows_links=True) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_plain(tmp_path / "file", 4)
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match=r"no ordinary file|symbolic links"):
            read_plain(tmp_path / name, 5)
        with pytest.raises(OSError, match=r"no ordinary file|symbolic links"):
            read_head(tmp_path / name, 5)
    assert read_head(tmp_path / "file", 3) == b"123"
    assert read_head(tmp_path / "file", 9) == b"12345"


def test_texts_under_names_of_secrets_are_hidden():
    settings = {"comet": {"api_key": "x", "apiKey": "x", "mode": "get"}, "a": [{"token": "x", "PASSWORD": "x"}], "n": 1}
    assert hide_secrets(settings) == {
        "comet": {"api_key": "(set)", "apiKey": "(set)", "mode": "get"},
        "a": [{"token": "(set)", "PASSWORD": "(set)"}],
        "n": 1,
    }
    assert settings["comet"]["api_key"] == "x"
    kept = {"layer_token_lr_schedule": {"enabled": False}, "experiment_key": "e", "api_key": None, "key_seed": "s"}
    assert hide_secrets(kept) == kept


def test_lists_numbers_and_sections_under_names_of_secrets_are_hidden():
    texts = (
        "api_keys", "keys", "hf_token", "hf_tokens", "token_value", "authorization", "basic_auth", "Bearer", "pwd",
        "db_pwd", "passphrase", "client_secret", "credentials", "private-key", "password",
    )  # fmt: skip
    for name in texts:
        for entry in ("x", ["x"], {"value": "x"}, [{"value": ["", "x"]}]):
            assert hide_secrets({"wandb": {name: entry}}) == {"wandb": {name: "(set)"}}
    assert hide_secrets({"password": 1234, "pwd": 0, "keys": [1.5]}) == dict.fromkeys(
        ("password", "pwd", "keys"), "(set)"
    )


def test_settings_that_only_sound_like_secrets_are_kept():
    kept = {
        "max_tokens": 512, "num_tokens": 5, "max_out_tokens": 1, "eos_tokens": [1, 2], "token_type": "bpe",
        "tokenizer": "gpt2", "author": "me", "keyword": "x", "monkey": "x",
        "layer_token_lr_schedule": {"enabled": True},
        "use_auth": True, "password": None, "api_keys": [], "secret": {}, "token": "", "auth": {"enabled": False},
        "bypass": "x", "zero_optimization": {"stage": 1},
    }  # fmt: skip
    assert hide_secrets(kept) == kept


KEY = "kY7-distinctive-9Qz-secret"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--api_key", KEY, "x"], ["--api_key", "(set)", "x"]),
        ([f"--wandb-api-key={KEY}"], ["--wandb-api-key=(set)"]),
        ([f"HF_TOKEN={KEY}", "python"], ["HF_TOKEN=(set)", "python"]),
        (["--password", "1234"], ["--password", "(set)"]),
        (["--max_tokens", "10", "--max-tokens=1e3"], ["--max_tokens", "10", "--max-tokens=1e3"]),
        (["--token", "--verbose"], ["--token", "--verbose"]),
        (["--tokenizer", "gpt2", "--key-size"], ["--tokenizer", "gpt2", "--key-size"]),
        ([f"https://me:{KEY}@host/x"], ["https://(set)@host/x"]),
        ([f'{{"comet": {{"api_key": "{KEY}"}}}}'], ['{"comet": {"api_key": "(set)"}}']),
        ([f'--config={{"token": "{KEY}"}}'], ['--config={"token": "(set)"}']),
        ([f"{{'token': '{KEY}'"], ["(set)"]),
        (["--wandb_key", KEY, f"--hf-key={KEY}"], ["--wandb_key", "(set)", "--hf-key=(set)"]),
        (
            [f"--set=comet.api_key={KEY}", f"--env=HF_TOKEN={KEY}"],
            ["--set=comet.api_key=(set)", "--env=HF_TOKEN=(set)"],
        ),
        ([f"comet.api_key:{KEY}", f"Authorization: Bearer {KEY}"], ["comet.api_key:(set)", "Authorization:(set)"]),
        ([f"https://host/x?token={KEY}"], ["https://host/x?token=(set)"]),
        ([f"https://{KEY}@host/x", "ssh://git@host/x"], ["https://(set)@host/x", "ssh://git@host/x"]),
        (["--set=train.max_tokens=5", "host:8080", "a/b:c"], ["--set=train.max_tokens=5", "host:8080", "a/b:c"]),
        (["-m", "train", "lr=0.1", "a=b=c"], ["-m", "train", "lr=0.1", "a=b=c"]),
    ],
)
def test_words_of_a_command_have_no_secrets(words, shown):
    assert hide_in_words(words) == shown
