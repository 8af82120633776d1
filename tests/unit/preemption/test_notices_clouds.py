"""What each cloud says, and what becomes of it: Aws, Gcp and Azure against servers that speak as documented."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest

from reprieve.preemption.notices.aws import Aws
from reprieve.preemption.notices.azure import Azure
from reprieve.preemption.notices.gcp import Gcp
from reprieve.preemption.notices.metadata_server import MetadataError
from tests.support.helpers import FakeClock
from tests.support.metadata_servers import AwsServer, AzureServer, GcpServer, watching

LONG = timedelta(seconds=60)
SHORT = timedelta(milliseconds=150)
NO_PAUSE = timedelta(milliseconds=5)


@pytest.fixture
def aws() -> Iterator[AwsServer]:
    with AwsServer() as server:
        yield server


@pytest.fixture
def gcp() -> Iterator[GcpServer]:
    with GcpServer() as server:
        yield server


@pytest.fixture
def azure() -> Iterator[AzureServer]:
    with AzureServer() as server:
        yield server


# AWS


def test_aws_has_nothing_to_say(aws: AwsServer) -> None:
    assert Aws(aws.url).poll() is None
    asked = {request.path for request in aws.requests if request.method == "GET"}
    assert asked == {
        "/latest/meta-data/spot/instance-action",
        "/latest/meta-data/events/recommendations/rebalance",
    }


@pytest.mark.parametrize(("action", "word"), [("terminate", "terminated"), ("stop", "stopped")])
def test_aws_interrupts(aws: AwsServer, action: str, word: str) -> None:
    aws.action = {"action": action, "time": "2026-09-18T08:22:00Z"}
    notice = Aws(aws.url).poll()
    assert notice is not None
    assert (notice.source, notice.urgent) == ("AWS spot", True)
    assert notice.reason == f"the instance will be {word} at 08:22:00 UTC"
    assert notice.deadline == datetime(2026, 9, 18, 8, 22, tzinfo=timezone.utc)


def test_hibernation_begins_at_once(aws: AwsServer, clock: FakeClock) -> None:
    aws.action = {"action": "hibernate", "time": "2026-09-18T08:22:00Z"}
    notice = Aws(aws.url, clock=clock).poll()
    assert notice is not None and notice.urgent
    assert notice.deadline == datetime.fromtimestamp(clock.now, timezone.utc)


@pytest.mark.parametrize("said", [{"action": "terminate"}, {"action": "terminate", "time": "tomorrow"}])
def test_an_interruption_without_a_time_is_one(aws: AwsServer, said: dict[str, str]) -> None:
    aws.action = said
    notice = Aws(aws.url).poll()
    assert notice is not None and notice.urgent and notice.deadline is None


@pytest.mark.parametrize("said", [{}, {"action": "dance"}, {"action": ["stop"]}, [], "{", "[" * 100_000])
def test_aws_makes_no_sense(aws: AwsServer, said: object) -> None:
    aws.action = said
    with pytest.raises(MetadataError):
        Aws(aws.url).poll()


def test_a_recommendation_is_not_urgent_and_gives_way_to_an_interruption(aws: AwsServer) -> None:
    cloud = Aws(aws.url)
    aws.rebalance = {"noticeTime": "2026-09-18T08:20:00Z"}
    notice = cloud.poll()
    assert notice is not None
    assert not notice.urgent and notice.deadline is None and "rebalance" in notice.reason
    aws.notify()
    notice = cloud.poll()
    assert notice is not None and notice.urgent


def test_one_token_serves_until_shortly_before_its_end(aws: AwsServer, clock: FakeClock) -> None:
    cloud = Aws(aws.url, clock=clock)
    for _ in range(3):
        cloud.poll()
    clock.advance(6 * 3600 - 90)
    cloud.poll()
    assert len(aws.tokens) == 1
    clock.advance(60)
    cloud.poll()
    assert len(aws.tokens) == 2


def test_a_token_that_is_refused_is_replaced(aws: AwsServer) -> None:
    cloud = Aws(aws.url)
    cloud.poll()
    aws.expire_tokens()
    aws.notify()
    assert cloud.poll() is not None
    assert len(aws.tokens) == 2


def test_tokens_that_are_always_refused_are_an_error(aws: AwsServer) -> None:
    aws.valid = 1000
    with pytest.raises(MetadataError, match="instance-action: answered with status 401"):
        Aws(aws.url).poll()
    assert len(aws.requests) == 4  # and not one question more


# Google Cloud


def test_gcp_has_nothing_to_say(gcp: GcpServer) -> None:
    cloud = Gcp(gcp.url, wait=NO_PAUSE)
    assert cloud.poll() is None
    assert cloud.poll() is None


def test_a_preemption_gives_thirty_seconds(gcp: GcpServer, clock: FakeClock) -> None:
    gcp.notify()
    notice = Gcp(gcp.url, wait=LONG, clock=clock).poll()  # does not wait for a change from TRUE
    assert notice is not None
    assert (notice.source, notice.urgent) == ("Google Cloud spot", True)
    assert notice.deadline == datetime.fromtimestamp(clock.now + 30, timezone.utc)


def test_the_question_waits_at_the_server(gcp: GcpServer) -> None:
    with watching(Gcp(gcp.url, wait=LONG, pause=NO_PAUSE)) as heard:
        gcp.wait_for_requests(3)  # preempted, maintenance-event, and one that waits
        time.sleep(0.1)
        assert len(gcp.requests) == 3
        gcp.notify()
        assert heard.get(timeout=5).urgent
    query = gcp.requests[2].query
    assert query["wait_for_change"] == "true"
    assert query["timeout_sec"] == "60"
    assert query["last_etag"]


def test_a_question_that_waits_has_that_much_more_time(gcp: GcpServer) -> None:
    cloud = Gcp(gcp.url, wait=2 * SHORT, limit=SHORT)
    assert cloud.poll() is None
    assert cloud.poll() is None


def test_a_change_between_two_questions_is_not_missed(gcp: GcpServer) -> None:
    cloud = Gcp(gcp.url, wait=LONG)
    assert cloud.poll() is None
    gcp.notify()
    assert cloud.poll() is not None


def test_host_maintenance_is_worth_knowing(gcp: GcpServer) -> None:
    cloud = Gcp(gcp.url, wait=NO_PAUSE)
    gcp.set("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
    assert cloud.poll() is None
    gcp.set("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
    notice = cloud.poll()
    assert notice is not None
    assert not notice.urgent and notice.deadline is None and "maintenance" in notice.reason


def test_a_server_that_is_not_googles_is_not_believed(gcp: GcpServer) -> None:
    gcp.notify()
    gcp.flavor = {}
    with pytest.raises(MetadataError, match="not from Google's"):
        Gcp(gcp.url).poll()


def test_a_value_that_is_neither(gcp: GcpServer) -> None:
    gcp.set("preempted", "MAYBE")
    with pytest.raises(MetadataError, match="neither TRUE nor FALSE"):
        Gcp(gcp.url).poll()


# Azure


def in_seconds(clock: FakeClock, seconds: float) -> datetime:
    return datetime.fromtimestamp(clock.now + seconds, timezone.utc)


def test_azure_has_nothing_to_say(azure: AzureServer) -> None:
    cloud = Azure(azure.url)
    assert cloud.poll() is None
    assert cloud.poll() is None


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_schedules(azure: AzureServer, clock: FakeClock, kind: str) -> None:
    azure.schedule(kind, in_seconds(clock, 30))
    notice = Azure(azure.url, clock=clock).poll()
    assert notice is not None
    assert (notice.source, notice.urgent) == ("Azure", True)
    assert notice.deadline == in_seconds(clock, 30)
    assert f"not before {notice.deadline:%Y-%m-%d %H:%M:%S} UTC" in notice.reason


def test_names_of_machines_have_no_case(azure: AzureServer, clock: FakeClock) -> None:
    azure.name = "westno_0\n"
    azure.schedule("Preempt", in_seconds(clock, 30), machines=("WestNO_1", "WestNO_0"))
    assert Azure(azure.url, clock=clock).poll() is not None


def test_what_does_not_end_us_is_ignored(azure: AzureServer, clock: FakeClock) -> None:
    azure.schedule("Preempt", in_seconds(clock, 30), machines=("WestNO_1", "WestNO_00"))
    azure.schedule("Preempt", "", machines=())
    azure.schedule("Freeze", in_seconds(clock, 30))
    azure.schedule("Party", in_seconds(clock, 30))
    assert Azure(azure.url, clock=clock).poll() is None


def test_an_event_that_has_begun_is_due_now(azure: AzureServer, clock: FakeClock) -> None:
    azure.schedule("Preempt", "")
    notice = Azure(azure.url, clock=clock).poll()
    assert notice is not None and notice.urgent
    assert notice.deadline == in_seconds(clock, 0)


def test_a_reboot_that_lies_behind_us_does_not_stop_the_next_run(azure: AzureServer) -> None:
    azure.schedule("Reboot", "")
    azure.schedule("Redeploy", "")
    assert Azure(azure.url).poll() is None


def test_an_event_whose_time_has_passed_still_counts(azure: AzureServer, clock: FakeClock) -> None:
    azure.schedule("Terminate", in_seconds(clock, -20))
    notice = Azure(azure.url, clock=clock).poll()
    assert notice is not None and notice.urgent
    assert notice.deadline == in_seconds(clock, -20)


def test_an_event_whose_time_cannot_be_read_still_counts(azure: AzureServer) -> None:
    azure.schedule("Preempt", "tomorrow")
    notice = Azure(azure.url).poll()
    assert notice is not None and notice.urgent and notice.deadline is None


def test_an_event_in_some_days_is_announced_and_becomes_urgent(azure: AzureServer, clock: FakeClock) -> None:
    azure.schedule("Redeploy", in_seconds(clock, 3 * 86400))
    cloud = Azure(azure.url, pause=NO_PAUSE, clock=clock)
    with watching(cloud) as heard:
        assert not heard.get(timeout=5).urgent
        clock.advance(3 * 86400 - 299)
        assert heard.get(timeout=5).urgent


def test_of_several_events_the_next_one_counts(azure: AzureServer, clock: FakeClock) -> None:
    azure.schedule("Redeploy", in_seconds(clock, 86400))
    azure.schedule("Terminate", in_seconds(clock, 200))
    azure.schedule("Preempt", in_seconds(clock, 30))
    notice = Azure(azure.url, clock=clock).poll()
    assert notice is not None and "(Preempt)" in notice.reason


def test_the_first_answer_may_take_long_and_the_next_may_not(azure: AzureServer) -> None:
    cloud = Azure(azure.url, limit=SHORT)
    azure.first_delay = 0.2
    assert cloud.poll() is None
    azure.first_delay = 0.2
    with pytest.raises(MetadataError, match=r"no whole answer within 0\.15 s"):
        cloud.poll()


@pytest.mark.parametrize("events", ["null", "{}", '"Preempt"'])
def test_azure_makes_no_sense(azure: AzureServer, events: str) -> None:
    azure.document = f'{{"Events": {events}}}'
    with pytest.raises(MetadataError, match="scheduledevents"):
        Azure(azure.url).poll()


def test_an_event_that_makes_no_sense_does_not_hide_ours(azure: AzureServer) -> None:
    azure.events = [1, {}, {"Resources": "WestNO_0"}]
    assert Azure(azure.url).poll() is None
    azure.schedule("Preempt", "")
    assert Azure(azure.url).poll() is not None
