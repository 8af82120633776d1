"""The thread behind training: it writes background saves, prunes after them, and keeps their errors until raised."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from reprieve.checkpoint.buffers.thread_pool import ThreadPool
from reprieve.errors import RankFailed

log = logging.getLogger("reprieve")


class Background:
    """One thread that runs one job at a time. It keeps an error until a method here raises or returns it, once."""

    def __init__(self) -> None:
        self._thread = ThreadPool(1, "reprieve-save")
        self._jobs: list[Future[None]] = []
        self._save: Future[None] | None = None

    @property
    def writing(self) -> bool:
        """Whether a save is being written."""
        return self._save is not None and not self._save.done()

    def write(self, work: Callable[[], None]) -> Future[None]:
        """Queue the writing of a save."""
        self._save = self.submit(work)
        return self._save

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Queue any other work."""
        job: Future[None] = self._thread.submit(work)
        self._jobs.append(job)
        return job

    def run_now(self, work: Callable[[], None]) -> None:
        """Queue work and wait for it; raises its error."""
        self._thread.submit(work).result()

    def wait_for_save(self) -> None:
        """Wait until no save is being written, whether it succeeds or fails."""
        if self._save is not None:
            self._save.exception()

    def wait(self) -> None:
        """Wait for all work; raises the first error."""
        jobs, self._jobs = self._jobs, []
        if (error := _first_error(jobs)) is not None:
            raise error

    def drain(self) -> BaseException | None:
        """Wait until no save is being written; returns the first error of all work that is done."""
        self.wait_for_save()
        done = [job for job in self._jobs if job.done()]
        self._jobs = [job for job in self._jobs if job not in done]
        return _first_error(done)

    def raise_errors(self) -> None:
        """Raise the first error so far, if there is one."""
        if any(job.done() and job.exception() is not None for job in self._jobs):
            self.wait()
        # A job that has failed since is kept: the next call raises its error.
        self._jobs = [job for job in self._jobs if not job.done() or job.exception() is not None]

    @contextlib.contextmanager
    def own_error_first(self) -> Iterator[None]:
        """Raise this rank's own background error in place of RankFailed: a background save that fails, fails on all
        ranks, and each of them should raise it once."""
        try:
            yield
        except RankFailed:
            self.wait_for_save()  # its failure may not have arrived here yet
            self.raise_errors()
            raise

    def join(self) -> None:
        self._thread.join()


def _first_error(jobs: Sequence[Future[None]]) -> BaseException | None:
    """The first error of these jobs. The others are logged, since nothing will raise them."""
    errors = [error for job in jobs if (error := job.exception()) is not None]
    for error in errors[1:]:
        log.error("another background job failed, too: %s", error)
    return errors[0] if errors else None
