"""Tells Kubeflow Trainer how far a TrainJob is: its `status.trainerStatus` (KEP-2779).

The controller puts `KUBEFLOW_TRAINER_SERVER_URL`, `_CA_CERT` and `_TOKEN` into its pods, the last two as paths. The
token is read anew each time, because it is replaced every hour, and goes nowhere but into the request.
https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress
"""

from __future__ import annotations

import http.client
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from reprieve.clock import Clock, SystemClock
from reprieve.errors import ReprieveError
from reprieve.progress.formats import progress_json
from reprieve.progress.snapshot import Progress

URL, CA_CERT, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{one}" for one in ("URL", "CA_CERT", "TOKEN"))

_EVERY_S = 10.0
"""The server takes 5 requests a second from all jobs of a cluster together (its default)."""
_LONGEST_PAUSE_S = 300.0
_LIMIT_S = 5.0
_METRICS = 200
_BYTES = 2**16
"""The server takes no more."""


class KubeflowError(ReprieveError):
    """The status server could not be told. It goes no further than a warning in the log."""


class KubeflowSink:
    """Pushes every so often, less often while that fails, and once at the end whatever happened before."""

    every_s = 1.0

    def __init__(self, env: Mapping[str, str] = os.environ, *, clock: Clock | None = None) -> None:
        self._url = urlsplit(env[URL])
        self._ca = env.get(CA_CERT) or None
        self._token = env.get(TOKEN) or None
        self._clock = clock or SystemClock()
        self._next = 0.0
        self._pause_s = _EVERY_S
        self._told_end = False

    @property
    def name(self) -> str:
        return f"Kubeflow's status server {self._url.hostname}"

    def update(self, progress: Progress) -> None:
        now = self._clock.monotonic()
        if self._told_end or (now < self._next and not progress.ended):
            return
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._next = now + self._pause_s
        self._push(progress)
        self._pause_s = _EVERY_S
        self._next = now + self._pause_s
        self._told_end = progress.ended

    def close(self, progress: Progress) -> None:
        if not self._told_end:
            self._push(progress)

    def _push(self, progress: Progress) -> None:
        """http.client knows no proxy and follows no redirect: the token goes to the server that was named."""
        headers = {"Authorization": f"Bearer {_read_token(self._token)}", "Content-Type": "application/json"}
        connection = _connect(self._url, self._ca)
        try:
            path = self._url.path + (f"?{self._url.query}" if self._url.query else "")
            connection.request("POST", path or "/", body(progress), headers)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise KubeflowError(f"{type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if status != http.client.OK:
            raise KubeflowError(f"it answered with status {status}")


def body(progress: Progress) -> bytes:
    """What is pushed. As many metrics as fit."""
    told = {name: str(value) for name, value in _metrics(progress).items() if name and value is not None}
    status: dict[str, Any] = {"lastUpdatedTime": progress_json.moment(progress.at)}
    if (percentage := progress_json.percentage(progress)) is not None:
        status["progressPercentage"] = percentage
    if (seconds := progress_json.seconds_left(progress)) is not None:
        status["estimatedRemainingSeconds"] = seconds
    most = _METRICS
    while True:
        status["metrics"] = [{"name": name, "value": value} for name, value in list(told.items())[:most]]
        data = progress_json.dumps({"trainerStatus": status})
        if len(data) <= _BYTES:
            return data
        most //= 2


def _metrics(progress: Progress) -> dict[str, Any]:
    ours = {
        "state": progress.state,
        "currentStep": progress.step,
        "totalSteps": progress.total_steps,
        "currentEpoch": progress_json.text(progress.epoch, 2),
        "totalEpochs": progress_json.whole(progress.total_epochs),
        "resumedFrom": progress.resumed_from,
        "restarts": progress.restarts,
        "latestCheckpoint": progress.checkpoints.latest,
        "checkpointsCreated": progress.checkpoints.created,
    }
    logged = {**progress.train, **progress.evaluation}
    return {**ours, **{name: progress_json.spelt(value) for name, value in logged.items()}}


def _connect(url: SplitResult, ca: str | None) -> http.client.HTTPConnection:
    host = url.hostname or ""
    if url.scheme == "https":
        try:
            context = ssl.create_default_context(cafile=ca)
        except OSError as error:
            raise KubeflowError(f"the certificates {ca} cannot be read: {error.strerror or error}") from None
        return http.client.HTTPSConnection(host, url.port, timeout=_LIMIT_S, context=context)
    if url.scheme == "http" and host in ("127.0.0.1", "::1", "localhost"):
        return http.client.HTTPConnection(host, url.port, timeout=_LIMIT_S)
    raise KubeflowError(f"{URL} is no https:// address: the token is not sent in the clear")


def _read_token(path: str | None) -> str:
    if path is None:
        raise KubeflowError(f"{TOKEN} is not set")
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise KubeflowError(f"the token {path} cannot be read: {reason}") from None
    # http.client would name a token that is no header in its error.
    if not token or not token.isprintable() or " " in token:
        raise KubeflowError(f"{path} holds no token")
    return token
