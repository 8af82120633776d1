"""What goes on behind training: the save that is being written, retention after it, and what went wrong there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from reprieve.checkpoint.buffers.thread_pool import ThreadPool

log = logging.getLogger("reprieve")


class Background:
    """One thread, so one thing at a time. An error waits until somebody asks for it, and is told once."""

    def __init__(self) -> None:
        self._thread = ThreadPool(1, "reprieve-save")
        self._jobs: list[Future[None]] = []
        self._save: Future[None] | None = None

    @property
    def writing(self) -> bool:
        """Is a save being written?"""
        return self._save is not None and not self._save.done()

    def write(self, work: Callable[[], None]) -> Future[None]:
        """A save."""
        self._save = self.do(work)
        return self._save

    def do(self, work: Callable[[], None]) -> Future[None]:
        """Anything else."""
        job: Future[None] = self._thread.submit(work)
        self._jobs.append(job)
        return job

    def do_now(self, work: Callable[[], None]) -> None:
        """As soon as the thread comes to it, and waited for; raises what went wrong."""
        self._thread.submit(work).result()

    def let_save_end(self) -> None:
        """Until no save is being written, well or not."""
        if self._save is not None:
            self._save.exception()

    def wait(self) -> None:
        """Until everything is done; raises what went wrong first."""
        jobs, self._jobs = self._jobs, []
        if (error := _first_error(jobs)) is not None:
            raise error

    def drain(self) -> BaseException | None:
        """Until no save is being written; what went wrong in all that is done."""
        self.let_save_end()
        done = [job for job in self._jobs if job.done()]
        self._jobs = [job for job in self._jobs if job not in done]
        return _first_error(done)

    def raise_error(self) -> None:
        """If something has gone wrong so far."""
        if any(job.done() and job.exception() is not None for job in self._jobs):
            self.wait()
        # One that has failed since is kept: it is told the next time.
        self._jobs = [job for job in self._jobs if not job.done() or job.exception() is not None]

    def join(self) -> None:
        self._thread.join()


def _first_error(jobs: Sequence[Future[None]]) -> BaseException | None:
    """What went wrong first in these; the others are said here, since nobody will raise them."""
    errors = [error for job in jobs if (error := job.exception()) is not None]
    for error in errors[1:]:
        log.error("in the background this went wrong, too: %s", error)
    return errors[0] if errors else None
