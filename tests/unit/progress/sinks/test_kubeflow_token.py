"""The token of Kubeflow's status server is sent only there."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprieve.progress.publisher import Publisher
from reprieve.progress.sinks.kubeflow import KubeflowError, KubeflowSink
from reprieve.progress.tracker import Tracker
from tests.support.helpers import FakeClock
from tests.support.progress_kit import progress, strict_json, wait_until
from tests.support.status_server import TOKEN, StatusServer, make_certificate

CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def server() -> Iterator[StatusServer]:
    server = StatusServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def test_over_tls(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    server = StatusServer(certificate)
    try:
        sink = KubeflowSink(server.environment(tmp_path, **{CA_CERT: str(certificate[0])}))
        sink.update(progress())
        assert strict_json(server.bodies[0])["trainerStatus"]["progressPercentage"] == 50
    finally:
        server.close()


def test_a_server_that_cannot_be_trusted_gets_no_token(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    server = StatusServer(certificate)
    try:
        with pytest.raises(KubeflowError, match="certificate verify failed"):
            KubeflowSink(server.environment(tmp_path)).update(progress())
        other = server.environment(tmp_path, **{CA_CERT: str(certificate[0])})
        other["KUBEFLOW_TRAINER_SERVER_URL"] = server.url.replace("localhost", "127.0.0.1")
        with pytest.raises(KubeflowError, match="certificate verify failed"):
            KubeflowSink(other).update(progress())
        assert server.bodies == server.refused == []
    finally:
        server.close()


def test_certificates_that_are_not_there(tmp_path: Path) -> None:
    env = {"KUBEFLOW_TRAINER_SERVER_URL": "https://localhost:1/", CA_CERT: "/no/such/ca.crt"}
    (tmp_path / "token").write_text(TOKEN)
    with pytest.raises(KubeflowError, match=r"the certificates /no/such/ca\.crt cannot be read: No such file"):
        KubeflowSink({**env, "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token")}).update(progress())


def test_the_token_is_not_sent_in_the_clear(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    env = {"KUBEFLOW_TRAINER_SERVER_URL": "http://trainer.example.com/x"}
    with pytest.raises(KubeflowError, match="not sent unencrypted"):
        KubeflowSink({**env, "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token")}).update(progress())


@pytest.mark.parametrize("code", [301, 302, 307])
def test_the_token_follows_no_redirect(server: StatusServer, tmp_path: Path, code: int) -> None:
    server.status = code
    with pytest.raises(KubeflowError, match=f"status {code}"):
        KubeflowSink(server.environment(tmp_path)).update(progress())
    assert server.refused == [code]


def test_no_proxy_gets_the_token(server: StatusServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    KubeflowSink(server.environment(tmp_path)).update(progress())
    assert len(server.bodies) == 1


def test_a_token_that_was_replaced_is_read_again(server: StatusServer, tmp_path: Path, clock: FakeClock) -> None:
    sink = KubeflowSink(server.environment(tmp_path), clock=clock)
    sink.update(progress())
    server.token = "another"
    (tmp_path / "token").write_text("another")
    clock.advance(60.0)
    sink.update(progress())
    assert (len(server.bodies), server.refused) == (2, [])


@pytest.mark.parametrize("content", ["", "two words", "two\nlines", f"{TOKEN}\x00", f"{TOKEN}é", None])
def test_what_is_no_token_is_not_shown(server: StatusServer, tmp_path: Path, content: str | None) -> None:
    env = server.environment(tmp_path)
    if content is None:
        (tmp_path / "token").unlink()
    else:
        (tmp_path / "token").write_text(content)
    with pytest.raises(KubeflowError) as raised:
        KubeflowSink(env).update(progress())
    assert str(tmp_path / "token") in str(raised.value)
    assert TOKEN not in str(raised.value)
    assert "two" not in str(raised.value).replace(str(tmp_path), "")
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("broken", ["status", "token", "gone"])
def test_the_token_is_never_logged(
    broken: str, server: StatusServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = server.environment(tmp_path)
    if broken == "token":
        (tmp_path / "token").write_text(f"{TOKEN}\n{TOKEN}")
    elif broken == "status":
        server.status = 403
    else:
        env["KUBEFLOW_TRAINER_SERVER_URL"] = "http://127.0.0.1:1/x"
    with caplog.at_level(logging.DEBUG), Publisher(Tracker(), [KubeflowSink(env)]):
        wait_until(lambda: caplog.records)
    assert "Kubeflow" in caplog.text
    assert TOKEN not in caplog.text
