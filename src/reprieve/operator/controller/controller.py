"""StatusController: keeps `status.trainingProgress` of all jobs that ask for checkpoints. The leader runs one.

informers ─► tracked jobs ─► reconcile (pure) ─► writer ─► what the API server returns ─► tracked jobs
polls of rank 0 ─┘    each change, and each job once a while: some states come by time alone

One job has one write and one poll at a time. Changes within a tick become one write.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone

from reprieve.errors import KubernetesError, NotPermitted, ObjectChanged, ObjectNotFound
from reprieve.kubernetes.api import KubernetesApi
from reprieve.kubernetes.jobs.reader import PROGRESS_PATH
from reprieve.kubernetes.jobs.reports import NoReport, from_answer
from reprieve.kubernetes.jobs.training_progress import TrainingProgress
from reprieve.kubernetes.kinds import POD, TRAIN_JOB
from reprieve.kubernetes.names import JOB_SET_LABEL
from reprieve.operator.controller.informer import Informer
from reprieve.operator.controller.pod_request import BadAnswer, NoAnswer
from reprieve.operator.controller.tracked_job import TrackedJob
from reprieve.operator.controller.writer import JobWriter
from reprieve.operator.log import fields
from reprieve.operator.metrics.counters import Counters
from reprieve.operator.status.objects import ObservedJob, ObservedPod, job_of, pod_of
from reprieve.operator.status.poll_schedule import poll_interval
from reprieve.operator.status.reconcile import Writes, reconcile

log = logging.getLogger(__name__)

TICK_S = 0.25
CHECK_S = 15.0
"""How often each job is decided about: data gets old, a node is lost, or storage missing, by time alone."""
MAX_POLLS = 64
MAX_WRITES = 16
FIRST_RETRY_S = 1.0
MAX_DOUBLINGS = 6
MAX_RETRY_S = FIRST_RETRY_S * 2**MAX_DOUBLINGS

AskPod = Callable[[ObservedPod, str], Awaitable[bytes]]
"""Requests a path of a pod; NoAnswer: it has none."""
Key = tuple[str, str]
"""Namespace and name of a job."""


class StatusController:
    """`run` observes, decides and writes until it is cancelled."""

    def __init__(self, api: KubernetesApi, ask: AskPod, counters: Counters) -> None:
        self._ask = ask
        self._counters = counters
        self.tracked: dict[Key, TrackedJob] = {}
        self.jobs = Informer(
            api, TRAIN_JOB, job_of, on_change=self._take_job, on_delete=self._lose_job, counters=counters
        )
        self.pods = Informer(
            api,
            POD,
            pod_of,
            on_change=self._take_pod,
            on_delete=self._lose_pod,
            counters=counters,
            labels={JOB_SET_LABEL: None},
        )
        for result in ("ok", "no_answer", "bad_answer"):
            counters.declare("polls", result=result)
        self._writer = JobWriter(api, counters, self.jobs.note)
        self._running: set[asyncio.Task[None]] = set()
        self._polls = asyncio.Semaphore(MAX_POLLS)
        self._writes = asyncio.Semaphore(MAX_WRITES)

    async def run(self) -> None:
        """Run until cancelled."""
        parts = [asyncio.create_task(part) for part in (self.jobs.run(), self.pods.run(), self._tick())]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            tasks = [*parts, *self._running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def observed_jobs(self) -> list[tuple[ObservedJob, ObservedPod | None]]:
        """Each job with its newest pod of rank 0."""
        return [(each.job, each.rank_zero) for each in self.tracked.values() if each.job is not None]

    # What changes

    def _of(self, namespace: str, name: str) -> TrackedJob:
        return self.tracked.setdefault((namespace, name), TrackedJob())

    def _take_job(self, job: ObservedJob) -> None:
        self._of(job.namespace, job.name).take_job(job)

    def _lose_job(self, job: ObservedJob) -> None:
        tracked = self._of(job.namespace, job.name)
        if tracked.job is not None and tracked.job.uid == job.uid:
            tracked.job = None
            tracked.forget_pods()
            self._drop_empty(job.namespace, job.name)

    def _take_pod(self, pod: ObservedPod) -> None:
        self._of(pod.namespace, pod.job).take_pod(pod)

    def _lose_pod(self, pod: ObservedPod) -> None:
        self._of(pod.namespace, pod.job).lose_pod(pod)
        self._drop_empty(pod.namespace, pod.job)

    def _drop_empty(self, namespace: str, name: str) -> None:
        tracked = self.tracked.get((namespace, name))
        if tracked is not None and tracked.job is None and not tracked.pods:
            del self.tracked[namespace, name]

    # What is due

    async def _tick(self) -> None:
        await self.jobs.has_synced.wait()
        await self.pods.has_synced.wait()
        log.info("observes", extra=fields(jobs=len(self.jobs), pods=len(self.pods)))
        while True:
            now = time.monotonic()
            for tracked in list(self.tracked.values()):
                if tracked.job is None:
                    continue
                if now >= tracked.due_at and not tracked.is_polling and (pod := tracked.pod_to_poll) is not None:
                    tracked.is_polling, tracked.due_at = True, math.inf
                    self._spawn(self._poll(tracked, pod))
                is_due = tracked.is_changed or now >= tracked.check_at
                if is_due and not tracked.is_writing and now >= tracked.write_after:
                    self._decide(tracked)
            await asyncio.sleep(TICK_S)

    def _decide(self, tracked: TrackedJob) -> None:
        tracked.is_changed, tracked.check_at = False, time.monotonic() + CHECK_S
        now = datetime.now(timezone.utc)
        observed = tracked.observed(now)
        if observed is None:
            return
        for pod in tracked.new_strangers():
            log.warning(
                "a pod has the labels of the job, but no Job of it controls it: it is ignored",
                extra=fields(namespace=pod.namespace, name=pod.job, pod=pod.name),
            )
        try:
            writes = reconcile(observed)
        except Exception:  # what one job reports must not end the status of all others
            tracked.write_after = time.monotonic() + MAX_RETRY_S
            where = fields(namespace=observed.job.namespace, name=observed.job.name)
            log.exception("what happened to the job cannot be understood", extra=where)
            return
        if writes.progress is None:
            tracked.forget_pods()
        if writes == Writes():
            return
        tracked.is_writing = True
        self._spawn(self._write(tracked, observed.job, writes, now))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _write(self, tracked: TrackedJob, job: ObservedJob, writes: Writes, now: datetime) -> None:
        try:
            async with self._writes:
                await self._writer.write(job, writes, now)
            tracked.failures = 0
        except (ObjectNotFound, ObjectChanged):
            tracked.is_changed = True
            tracked.write_after = time.monotonic() + FIRST_RETRY_S  # the watch brings what is new
        except KubernetesError as error:
            tracked.is_changed = True
            tracked.failures += 1
            wait_s = FIRST_RETRY_S * 2 ** min(tracked.failures, MAX_DOUBLINGS)
            tracked.write_after = time.monotonic() + (MAX_RETRY_S if isinstance(error, NotPermitted) else wait_s)
        finally:
            tracked.is_writing = False

    async def _poll(self, tracked: TrackedJob, pod: ObservedPod) -> None:
        try:
            async with self._polls:
                await self._ask_for_progress(tracked, pod)
        finally:
            tracked.is_polling = False
            tracked.is_changed = True
            if tracked.due_at == math.inf:  # else a pod has started meanwhile, or has got SIGTERM: it is due at once
                tracked.due_at = time.monotonic() + self._interval_s(tracked, pod)

    async def _ask_for_progress(self, tracked: TrackedJob, pod: ObservedPod) -> None:
        now = datetime.now(timezone.utc)
        try:
            report = from_answer(await self._ask(pod, PROGRESS_PATH), pod.name, now)
        except BadAnswer as error:
            self._counters.add("polls", result="bad_answer")
            tracked.unreachable = str(error)
            self._warn_once(tracked, pod, (str(error),))
            return
        except NoAnswer as error:
            self._counters.add("polls", result="no_answer")
            tracked.unreachable = str(error)
            return
        except NoReport as error:
            self._counters.add("polls", result="bad_answer")
            tracked.unreachable = f"its answer is no progress: {error}"
            self._warn_once(tracked, pod, (str(error),))
            return
        self._counters.add("polls", result="ok")
        tracked.report, tracked.reached_at, tracked.unreachable = report, now, ""
        self._warn_once(tracked, pod, report.problems)

    def _interval_s(self, tracked: TrackedJob, pod: ObservedPod) -> float:
        if tracked.job is None:
            return CHECK_S
        current, report = tracked.pods.get(pod.uid, pod), tracked.report
        return poll_interval(
            tracked.job,
            report.progress if report is not None and report.pod == pod.name else TrainingProgress(),
            datetime.now(timezone.utc),
            is_stopping=current.deleted_at is not None,
            random=random.random(),  # noqa: S311 - spreads polls over time
        ).total_seconds()

    def _warn_once(self, tracked: TrackedJob, pod: ObservedPod, problems: tuple[str, ...]) -> None:
        if problems and problems != tracked.problems:
            log.warning(
                "rank 0 reports what cannot be: %s",
                "; ".join(problems),
                extra=fields(namespace=pod.namespace, name=pod.job, pod=pod.name),
            )
        tracked.problems = problems
