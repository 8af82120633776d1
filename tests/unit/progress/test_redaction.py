"""Values that look like secrets are not stored, and others are."""

from __future__ import annotations

import pytest

from reprieve.launch.runs.run_record import RunRecord
from reprieve.progress.redaction import HIDDEN, is_secret, masked, storable

HF = "hf_AbCdEfGhIjKlMnOpQrStUvWx"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"
PRIVATE_KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk=\n-----END OPENSSH PRIVATE KEY-----"

SECRET = {
    "HF_TOKEN": "x",
    "hf_token": "x",
    "HUGGING_FACE_HUB_TOKEN": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SESSION_TOKEN": "x",
    "WANDB_API_KEY": "x",
    "OPENAI_APIKEY": "x",
    "MLFLOW_TRACKING_PASSWORD": "x",
    "DB_PASS": "x",
    "PGPASSWORD": "x",
    "MYSQL_PWD": "x",
    "SENTRY_DSN": "x",
    "DOCKER_AUTH_CONFIG": "x",
    "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json",
    "DATABASE_URL": "postgresql://me:hunter2@db.example.com:5432/runs",
    "REDIS_URL": "redis://:hunter2@cache.example.com:6379/0",
    "HTTPS_PROXY": "http://me:hunter2@proxy.example.com:3128",
    "MY_OWN": HF,
    "LOGIN": "ghp_0123456789abcdefghij",
    "SOMETHING": "sk-proj-0123456789abcdef",
    "ID": "AKIAIOSFODNN7EXAMPLE",
    "BEARER": JWT,
    "DEPLOY": PRIVATE_KEY,
    "DEPLOY_2": PRIVATE_KEY.replace("OPENSSH ", ""),
}
PLAIN = {
    "TOKENIZERS_PARALLELISM": "false",
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONPATH": "/home/me/src",
    "HOME": "/home/me",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "KEYBOARD": "us",
    "MONKEY": "x",
    "AUTHOR": "me",
    "COMPASS": "north",
    "MAX_TOKENS": "4096",
    "HF_HOME": "/data/hf_cache_of_everybody",
    "MASTER_ADDR": "10.0.0.1",
    "WANDB_BASE_URL": "https://wandb.example.com:8080/",
    "GIT_REMOTE": "ssh://git@example.com/me/repository",
    "NOTE": "see https://example.com/a:b for user@example.com",
    "EMPTY": "",
}


@pytest.mark.parametrize("name", SECRET)
def test_a_secret_is_left_out_and_named(name: str) -> None:
    kept, left_out = storable({name: SECRET[name], "HOME": "/home/me"})
    assert (kept, left_out) == ({"HOME": "/home/me"}, [name])


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_no_secret_is_kept(name: str) -> None:
    assert not is_secret(name, PLAIN[name])
    assert storable({name: PLAIN[name]}) == ({name: PLAIN[name]}, [])


def test_what_belongs_to_this_shell_is_neither_kept_nor_missed() -> None:
    assert storable({"PWD": "/x", "_": "/usr/bin/env", "SHLVL": "2", "SSH_AUTH_SOCK": "/tmp/s", "A": "1"}) == (
        {"A": "1"},
        [],
    )


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["train.py", "--hf-token", "secret-of-mine"], ["train.py", "--hf-token", HIDDEN]),
        (["--hf_token", "secret-of-mine", "--lr", "1"], ["--hf_token", HIDDEN, "--lr", "1"]),
        (["--token=secret-of-mine"], [f"--token={HIDDEN}"]),
        (["-token=secret-of-mine"], [f"-token={HIDDEN}"]),
        (["--wandb-api-key", "0123456789abcdef"], ["--wandb-api-key", HIDDEN]),
        (["--aws-secret-access-key=a/b+c=d/e=="], [f"--aws-secret-access-key={HIDDEN}"]),
        (["--db-password", "correct horse battery"], ["--db-password", HIDDEN]),
        ([HF], [HIDDEN]),
        (["push", HF, "model"], ["push", HIDDEN, "model"]),
        ([f"hub.key={HF}"], [f"hub.key={HIDDEN}"]),
        (["--store", "postgres://me:hunter2@db/runs"], ["--store", HIDDEN]),
        (["--store=postgres://me:hunter2@db/runs"], [f"--store={HIDDEN}"]),
    ],
)
def test_a_secret_on_the_command_line_is_masked(words: list[str], shown: list[str]) -> None:
    assert masked(words) == shown


@pytest.mark.parametrize(
    "words",
    [
        ["--tokenizer", "bert-base-uncased"],
        ["--tokenizer=bert-base-uncased"],
        ["--max-tokens", "512"],
        ["--max-new-tokens=512"],
        ["--eos-token", "<eos>"],
        ["--eos-token=<eos>"],
        ["--pad-token", "<|endoftext|>"],
        ["--token", "--push-to-hub"],
        ["--keyboard", "qwertyuiop"],
        ["--data", "https://example.com/a.tar", "s3://bucket/a:b"],
        ["python", "-c", "print('a = b')"],
        ["torchrun", "--nproc-per-node", "2", "train.py", "größe=12345678"],
        [],
    ],
)
def test_what_is_no_secret_is_shown(words: list[str]) -> None:
    assert masked(words) == words


@pytest.mark.parametrize(
    "word",
    [f"python train.py --hub-token {HF} --push", "WANDB_API_KEY=0123456789abcdef0123", f"Authorization: Bearer {JWT}"],
)
def test_a_secret_inside_a_word_is_masked(word: str) -> None:
    """`bash -c '…'`, `env NAME=value python …`, a header."""
    secrets = (HF, "0123456789abcdef", JWT)
    assert not any(secret in shown for secret in secrets for shown in masked(["bash", "-c", word]))


def test_nothing_secret_is_in_the_record() -> None:
    env = {**PLAIN, **{name: value if len(value) > 1 else f"the-value-of-{name}" for name, value in SECRET.items()}}
    words = ["train.py", "--hf-token", "secret-of-mine", "--token=another-of-mine", HF, "postgres://me:hunter2@db/runs"]
    kept, left_out = storable(env)
    text = RunRecord("r", masked(words), "/", {}, kept, left_out).to_json().decode()
    for secret in (*(env[name] for name in SECRET), "secret-of-mine", "another-of-mine", "hunter2"):
        assert secret.split("\n")[0] not in text
    assert "the-value-of" not in text
    assert PLAIN["WANDB_BASE_URL"] in text
