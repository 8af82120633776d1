"""Sends progress to Kubeflow Trainer, for `status.trainerStatus` of a TrainJob (KEP-2779).

The controller puts `KUBEFLOW_TRAINER_SERVER_URL`, `_CA_CERT` and `_TOKEN` into its pods, the last two as paths. The
token is read for each request, because it is replaced every hour, and is not used for anything else.
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

URL, CA_CERT, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))

_INTERVAL_S = 10.0
"""By default the server accepts 5 requests a second from all jobs of a cluster together."""
_MAX_INTERVAL_S = 300.0
_TIMEOUT_S = 5.0
_MAX_METRICS = 200
_MAX_BYTES = 2**16
"""Limits of the server."""


class KubeflowError(ReprieveError):
    """The status server cannot be reached. The publisher logs this as a warning."""


class KubeflowSink:
    """Pushes progress every 10 s, less often while that fails, and once at the end in any case."""

    every_s = 1.0

    def __init__(self, env: Mapping[str, str] = os.environ, *, clock: Clock | None = None) -> None:
        self._url = urlsplit(env[URL])
        self._ca = env.get(CA_CERT) or None
        self._token = env.get(TOKEN) or None
        self._clock = clock or SystemClock()
        self._next_push = 0.0
        self._interval_s = _INTERVAL_S
        self._sent_end = False

    @property
    def name(self) -> str:
        return f"Kubeflow's status server {self._url.hostname}"

    def update(self, progress: Progress) -> None:
        now = self._clock.monotonic()
        if self._sent_end or (now < self._next_push and not progress.ended):
            return
        self._interval_s = min(2 * self._interval_s, _MAX_INTERVAL_S)
        self._next_push = now + self._interval_s
        self._push(progress)
        self._interval_s = _INTERVAL_S
        self._next_push = now + self._interval_s
        self._sent_end = progress.ended

    def close(self, progress: Progress) -> None:
        if not self._sent_end:
            self._push(progress)

    def _push(self, progress: Progress) -> None:
        """POST the status. http.client uses no proxy and follows no redirect: only the named server gets the token."""
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
            raise KubeflowError(f"it responded with status {status}")


def body(progress: Progress) -> bytes:
    """Return the body of the request, with as many metrics as fit."""
    metrics = {name: str(value) for name, value in _metrics(progress).items() if name and value is not None}
    status: dict[str, Any] = {"lastUpdatedTime": progress_json.timestamp(progress.at)}
    if (percentage := progress_json.percentage(progress)) is not None:
        status["progressPercentage"] = percentage
    if (seconds := progress_json.remaining_seconds(progress)) is not None:
        status["estimatedRemainingSeconds"] = seconds
    limit = _MAX_METRICS
    while True:
        status["metrics"] = [{"name": name, "value": value} for name, value in list(metrics.items())[:limit]]
        data = progress_json.dumps({"trainerStatus": status})
        if len(data) <= _MAX_BYTES:
            return data
        limit //= 2


def _metrics(progress: Progress) -> dict[str, Any]:
    general = {
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
    return {**general, **{name: progress_json.exact_text(value) for name, value in logged.items()}}


def _connect(url: SplitResult, ca: str | None) -> http.client.HTTPConnection:
    host = url.hostname or ""
    if url.scheme == "https":
        try:
            context = ssl.create_default_context(cafile=ca)
        except OSError as error:
            raise KubeflowError(f"the certificates {ca} cannot be read: {error.strerror or error}") from None
        return http.client.HTTPSConnection(host, url.port, timeout=_TIMEOUT_S, context=context)
    if url.scheme == "http" and host in ("127.0.0.1", "::1", "localhost"):
        return http.client.HTTPConnection(host, url.port, timeout=_TIMEOUT_S)
    raise KubeflowError(f"{URL} is not an https:// address: the token is not sent unencrypted")


def _read_token(path: str | None) -> str:
    if path is None:
        raise KubeflowError(f"{TOKEN} is not set")
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise KubeflowError(f"the token {path} cannot be read: {reason}") from None
    # For a token that is not a valid header, http.client would show it in its error message.
    if not token or not token.isprintable() or " " in token:
        raise KubeflowError(f"{path} does not hold a token")
    return token
