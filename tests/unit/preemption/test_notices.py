"""Notices of clouds, whatever their servers do: the watcher, its requests, and which clouds are asked."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from reprieve.errors import ConfigError
from reprieve.preemption.notices import Notice, NoticePoller, detect_clouds
from reprieve.preemption.notices.aws import Aws
from reprieve.preemption.notices.azure import Azure
from reprieve.preemption.notices.gcp import Gcp
from reprieve.preemption.notices.metadata_server import MetadataError, MetadataServer
from tests.support import metadata_servers as servers
from tests.support.metadata_servers import AwsServer, AzureServer, GcpServer, LocalServer, Oddity, soon, watching

LONG = timedelta(seconds=60)
SHORT = timedelta(milliseconds=150)
NO_PAUSE = timedelta(milliseconds=5)

PAIRS = [(AwsServer, Aws), (GcpServer, Gcp), (AzureServer, Azure)]
each_cloud = pytest.mark.parametrize(("server_type", "cloud_type"), PAIRS, ids=["aws", "gcp", "azure"])


@pytest.fixture
def aws() -> Iterator[AwsServer]:
    with AwsServer() as server:
        yield server


def made(cloud_type: Any, server: LocalServer, *, limit: timedelta = LONG, pause: timedelta = NO_PAUSE) -> Any:
    """A cloud that asks this server, in a hurry."""
    more = {"wait": NO_PAUSE} if cloud_type is Gcp else {"first_limit": limit} if cloud_type is Azure else {}
    return cloud_type(server.url, limit=limit, pause=pause, **more)


def hears(cloud: Any) -> bool:
    with contextlib.suppress(MetadataError):  # the limit is short, and machines are busy
        return cloud.poll() is not None
    return False


# Whatever the server does

ODDITIES: dict[str, tuple[Oddity, str]] = {
    "500": (servers.status(500), "status 500"),
    "503": (servers.status(503), "status 503"),
    "403": (servers.status(403), "status 403"),
    "nonsense": (servers.says("<html>\u00e4\x00"), ""),
    "nothing": (servers.says(""), ""),
    "breaks off": (servers.says("TRUE", length=1000), "broke off"),
    "claims to be endless": (servers.says("TRUE", length=10**15), "broke off"),
    "hangs": (servers.hang, "no whole answer within 0.15 s"),
    "hangs up": (servers.hang_up, "without response"),
    "drips": (servers.drip, "no whole answer within 0.15 s"),
    "drips headers": (servers.drip_headers, "no whole answer within 0.15 s"),
    "huge": (servers.huge, "more than 1048576 bytes"),
    "huge headers": (servers.huge_headers, ""),
    "not HTTP": (servers.not_http, "the answer is not HTTP"),
}


@each_cloud
@pytest.mark.parametrize("oddity", ODDITIES)
def test_an_odd_server_is_an_error_in_time_and_heard_again_afterwards(
    server_type: Any, cloud_type: Any, oddity: str
) -> None:
    with server_type() as server:
        # Time is limited where time is what is tested; a busy machine may be slow to send a megabyte.
        cloud = made(cloud_type, server, limit=SHORT if oddity == "hangs" or "drips" in oddity else LONG)
        server.odd, text = ODDITIES[oddity]
        begun = time.monotonic()
        with pytest.raises(MetadataError, match=text or None):
            cloud.poll()
        assert time.monotonic() - begun < 5
        server.odd = None
        server.notify()
        soon(lambda: hears(cloud))


@each_cloud
def test_a_watcher_outlives_all_that(server_type: Any, cloud_type: Any) -> None:
    with server_type() as server:
        server.odd = servers.status(500)
        with watching(made(cloud_type, server), longest_pause=NO_PAUSE) as heard:
            for odd in (servers.status(500), servers.says("<html>"), servers.hang_up, servers.not_http):
                server.odd = odd
                server.wait_for_requests(len(server.requests) + 3)
            server.odd = None
            server.notify()
            assert heard.get(timeout=5).urgent


@each_cloud
def test_nobody_listens(server_type: Any, cloud_type: Any) -> None:
    with server_type() as server:
        cloud = made(cloud_type, server)
    with pytest.raises(MetadataError, match="Connection refused"):
        cloud.poll()


@each_cloud
def test_a_redirect_is_not_followed(server_type: Any, cloud_type: Any) -> None:
    with server_type() as server, LocalServer() as elsewhere:
        server.odd = servers.status(302, Location=f"{elsewhere.url}/")
        with pytest.raises(MetadataError, match="status 302"):
            made(cloud_type, server).poll()
        assert not elsewhere.requests


@each_cloud
def test_no_proxy_is_used(server_type: Any, cloud_type: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with server_type() as server:
        assert made(cloud_type, server).poll() is None


# The watcher


@each_cloud
def test_a_notice_is_told_once(server_type: Any, cloud_type: Any) -> None:
    with server_type() as server:
        server.notify()
        with watching(made(cloud_type, server)) as heard:
            assert heard.get(timeout=5).urgent
            server.wait_for_requests(len(server.requests) + 9)
            with pytest.raises(Empty):
                heard.get(block=False)


def test_a_recommendation_and_then_an_interruption_are_both_told(aws: AwsServer) -> None:
    aws.rebalance = {"noticeTime": "2026-09-18T08:20:00Z"}
    with watching(made(Aws, aws)) as heard:
        assert not heard.get(timeout=5).urgent
        aws.notify()
        assert heard.get(timeout=5).urgent


def test_what_the_listener_raises_does_not_end_the_watcher(aws: AwsServer, caplog: pytest.LogCaptureFixture) -> None:
    heard: SimpleQueue[Notice] = SimpleQueue()

    def listener(notice: Notice) -> None:
        heard.put(notice)
        raise RuntimeError("not now")

    aws.rebalance = {"noticeTime": "2026-09-18T08:20:00Z"}
    watcher = NoticePoller(made(Aws, aws), listener)
    watcher.start()
    heard.get(timeout=5)
    aws.notify()
    assert heard.get(timeout=5).urgent
    watcher.close()
    soon(lambda: caplog.text.count("could not be passed on") == 2)


def test_trouble_is_logged_when_it_begins_changes_and_ends(aws: AwsServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "reprieve")

    def logged() -> list[tuple[str, str]]:
        return [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "reprieve"]

    aws.odd = servers.status(500)
    with watching(made(Aws, aws), longest_pause=NO_PAUSE):
        aws.wait_for_requests(5)
        aws.odd = servers.status(503)
        aws.wait_for_requests(len(aws.requests) + 5)
        aws.odd = None
        aws.wait_for_requests(len(aws.requests) + 9)
    what = "cannot poll AWS for notices: PUT /latest/api/token: answered with status"
    assert logged() == [
        ("WARNING", f"{what} 500. Training continues, and polling does, too"),
        ("WARNING", f"{what} 503. Training continues, and polling does, too"),
        ("INFO", "AWS answers again: notices are received"),
    ]


class Failing:
    """Notes when it is asked."""

    name = "Failing"
    pause = timedelta(milliseconds=10)

    def __init__(self) -> None:
        self.asked: list[float] = []

    def poll(self) -> Notice | None:
        self.asked.append(time.monotonic())
        raise KeyError


def test_after_errors_it_waits_longer_and_longer_up_to_a_limit() -> None:
    cloud = Failing()
    with watching(cloud, longest_pause=timedelta(milliseconds=80)):
        soon(lambda: len(cloud.asked) == 7)
    pauses = [later - earlier for earlier, later in zip(cloud.asked, cloud.asked[1:], strict=False)]
    for pause, least in zip(pauses, (0.02, 0.04, 0.08, 0.08, 0.08, 0.08), strict=True):
        assert pause >= 0.95 * least
    assert min(pauses[3:]) < 0.12  # on a busy machine some may be longer


@each_cloud
def test_close_returns_at_once_while_a_request_hangs(
    server_type: Any, cloud_type: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with server_type() as server:
        server.odd = servers.hang
        heard: SimpleQueue[Notice] = SimpleQueue()
        watcher = NoticePoller(made(cloud_type, server), heard.put)
        watcher.start()
        server.wait_for_requests(1)
        begun = time.monotonic()
        watcher.close()
        assert time.monotonic() - begun < 0.1
    # The server is gone now, and the request has failed: nobody hears of it, and the thread ends.
    watcher._thread.join(5)
    assert not watcher._thread.is_alive()
    assert heard.empty()
    assert not caplog.records


def test_a_notice_that_comes_after_close_is_not_told() -> None:
    with GcpServer() as gcp:
        with watching(Gcp(gcp.url, wait=LONG, pause=NO_PAUSE)) as heard:
            gcp.wait_for_requests(3)
        gcp.notify()
        soon(lambda: not any("Google" in thread.name for thread in threading.enumerate()))
    assert heard.empty()


PROGRAM = """
import sys
from datetime import timedelta
from reprieve.preemption.notices import NoticePoller
from reprieve.preemption.notices.aws import Aws

NoticePoller(Aws(sys.argv[1], limit=timedelta(minutes=1)), print).start()
input()
assert "torch" not in sys.modules
"""


def test_a_program_ends_while_a_request_hangs(aws: AwsServer) -> None:
    aws.odd = servers.hang
    command = [sys.executable, "-W", "error", "-c", PROGRAM, aws.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        aws.wait_for_requests(1)
        _, errors = program.communicate("\n", timeout=10)
    assert (program.returncode, errors) == (0, "")


# Which clouds

AMAZON = {"sys_vendor": "Amazon EC2", "bios_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}
XEN_AMAZON = {"sys_vendor": "Xen", "bios_vendor": "Xen", "bios_version": "4.11.amazon", "product_name": "HVM domU"}
GOOGLE = {"sys_vendor": "Google", "bios_vendor": "Google", "product_name": "Google Compute Engine"}
MICROSOFT = {"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}
AZURE = {**MICROSOFT, "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}
LAPTOP = {"sys_vendor": "LENOVO", "product_name": "21HMCTO1WW", "bios_vendor": "LENOVO", "bios_version": "N3XET"}
XEN = {**XEN_AMAZON, "bios_version": "4.17"}


@pytest.mark.parametrize(
    ("strings", "expected"),
    [
        (AMAZON, [Aws]),
        (XEN_AMAZON, [Aws]),
        (GOOGLE, [Gcp]),
        (AZURE, [Azure]),
        (MICROSOFT, []),
        (XEN, []),
        (LAPTOP, []),
        ({}, []),
    ],
)
def test_by_default_the_cloud_that_this_machine_says_it_is_in(
    tmp_path: Path, strings: dict[str, str], expected: list[type]
) -> None:
    for name, text in strings.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert [type(cloud) for cloud in detect_clouds(dmi=tmp_path, env={})] == expected
    assert detect_clouds(dmi=tmp_path / "missing", env={}) == []


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("off", []),
        ("none", []),
        ([], []),
        (["off"], []),
        ("aws", [Aws]),
        ("gcp", [Gcp]),
        ("azure", [Azure]),
        (("gcp", "aws", "gcp"), [Gcp, Aws]),
    ],
)
def test_clouds_by_name(choice: Any, expected: list[type]) -> None:
    assert [type(cloud) for cloud in detect_clouds(choice, env={})] == expected


@pytest.mark.parametrize("choice", ["amazon", "", ["aws", "ibm"], ["off", "aws"], ["auto", "aws"]])
def test_a_name_that_is_not_a_clouds(choice: Any) -> None:
    with pytest.raises(ConfigError, match=r"'auto', 'off', or one or more of 'aws', 'azure', 'gcp'"):
        detect_clouds(choice, env={})


def test_another_address_from_the_environment(aws: AwsServer) -> None:
    aws.notify()
    (cloud,) = detect_clouds("aws", env={"REPRIEVE_METADATA_URL": aws.url})
    assert cloud.poll() is not None
    with pytest.raises(ConfigError, match=r"REPRIEVE_METADATA_URL: 'http://example\.com'"):
        detect_clouds("aws", env={"REPRIEVE_METADATA_URL": "http://example.com"})


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1338",
        "http://127.8.9.10/",
        "http://localhost:80",
        "http://[::1]:8080",
        "http://169.254.169.254",
        "http://[fe80::a9fe:a9fe]",
        "http://[fd00:ec2::254]",
        "http://metadata.google.internal",
    ],
)
def test_addresses_that_may_be_asked(url: str) -> None:
    MetadataServer(url, limit=LONG)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com",
        "http://8.8.8.8",
        "http://10.0.0.1:80",
        "http://127.0.0.1@example.com",
        "http://127.0.0.1.example.com",
        "http://metadata.google.internal.example.com",
        "https://127.0.0.1",
        "127.0.0.1:1338",
        "http://127.0.0.1/latest",
        "http://127.0.0.1/?a=b",
        "http://127.0.0.1:port",
        "http://[::1",
        "http://",
        "file:///etc/passwd",
    ],
)
def test_addresses_that_may_not(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a metadata server"):
        MetadataServer(url, limit=LONG)
