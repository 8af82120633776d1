"""AWS: Spot interruptions and rebalance recommendations, from the instance metadata service (version 2).

A `NoticePoller` polls it. AWS gives notice two minutes ahead, as a JSON document under a path that returns 404 until
then.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from reprieve.clock import Clock, SystemClock
from reprieve.preemption.notices.metadata_server import Answer, MetadataError, MetadataServer
from reprieve.preemption.notices.poller import Notice

_URL = "http://169.254.169.254"
_PAUSE = timedelta(seconds=5)
"""As AWS recommends."""
_LIMIT = timedelta(seconds=2)
_TOKEN_TTL_S = 21600
"""The longest that AWS allows: six hours."""
_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"

_ACTIONS = {"terminate": "terminated", "stop": "stopped", "hibernate": "hibernated"}


class Aws:
    """The metadata service of an EC2 instance."""

    name = "AWS"

    def __init__(
        self,
        url: str = _URL,
        *,
        pause: timedelta = _PAUSE,
        limit: timedelta = _LIMIT,
        clock: Clock | None = None,
    ) -> None:
        self.pause = pause
        self._server = MetadataServer(url, limit=limit)
        self._clock = clock or SystemClock()
        self._token = ""
        self._token_ends = 0.0

    def poll(self) -> Notice | None:
        return self._interruption() or self._recommendation()

    def _interruption(self) -> Notice | None:
        answer = self._get("/latest/meta-data/spot/instance-action")
        if answer is None:
            return None
        notice = answer.json()
        if (action := str(notice.get("action"))) not in _ACTIONS:
            raise MetadataError("spot/instance-action: unknown action")
        # Hibernation begins at the notice, whatever time it contains.
        now = datetime.fromtimestamp(self._clock.time(), timezone.utc)
        deadline = now if action == "hibernate" else _utc(notice.get("time"))
        when = f"at {deadline:%H:%M:%S} UTC" if deadline else "soon"
        reason = f"the instance will be {_ACTIONS[action]} {when}"
        return Notice("AWS spot", reason, deadline, event=f"{action} {notice.get('time')}")

    def _recommendation(self) -> Notice | None:
        answer = self._get("/latest/meta-data/events/recommendations/rebalance")
        if answer is None:
            return None
        reason = "the instance is at elevated risk of interruption (rebalance recommendation)"
        return Notice("AWS spot", reason, urgent=False, event=f"rebalance {answer.json().get('noticeTime')}")

    def _get(self, path: str) -> Answer | None:
        """Return the document, or None if it does not exist now."""
        answer = self._request(path, accept=(200, 404, 401))
        if answer.status == 401:
            self._token_ends = 0.0  # the token expired early
            answer = self._request(path, accept=(200, 404))
        return answer if answer.status == 200 else None

    def _request(self, path: str, accept: tuple[int, ...]) -> Answer:
        return self._server.request(path, headers={"X-aws-ec2-metadata-token": self._valid_token()}, accept=accept)

    def _valid_token(self) -> str:
        now = self._clock.monotonic()
        if now >= self._token_ends:
            answer = self._server.request("/latest/api/token", method="PUT", headers={_TTL_HEADER: str(_TOKEN_TTL_S)})
            self._token = answer.text.strip()
            if not (self._token.isascii() and self._token.isprintable()):
                raise MetadataError("PUT /latest/api/token: the answer is not a token")
            # A minute early, so that it does not expire between two requests.
            self._token_ends = now + _TOKEN_TTL_S - 60
        return self._token


def _utc(text: object) -> datetime | None:
    """`2017-09-18T08:22:00Z`. An interruption at an unreadable time is still one."""
    try:
        time = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
    return time.astimezone(timezone.utc) if time.tzinfo else time.replace(tzinfo=timezone.utc)
