"""One start of a fine-tuning job, from its options to the result in the output folder.

What costs little is checked first: the sources, then the data, then what needs torch. A stop raises `Preempted` in
`training.train`; before that, and after it, the process ends at once, and the next start repeats that part.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from reprieve.checkpoint.folder.catalog import list_checkpoints
from reprieve.checkpoint.folder.lease import read_record as read_lease
from reprieve.checkpoint.folder.paths import LEASE_FOLDER
from reprieve.checkpoint.folder.storage_errors import explained, permitted
from reprieve.errors import ConfigError, RankFailed, RanksError, StoreLost, is_permanent, needing
from reprieve.finetune import merge, summary
from reprieve.finetune.data import read_rows
from reprieve.finetune.download import download
from reprieve.finetune.environment import (
    complete_variables,
    is_first_of_node,
    is_first_rank,
    print_once,
    use_writable_caches,
)
from reprieve.finetune.job_record import FILE, JobRecord, make_durable, read_record
from reprieve.finetune.options import FinetuneOptions
from reprieve.finetune.sources import DATASET, MODEL, HubId, check_model, find_source
from reprieve.launch.messages import print_message
from reprieve.launcher_protocol import Reporter, Stopping
from reprieve.preemption.deadline import resolve_grace_period
from reprieve.preemption.process_exit import Preempted, process_exit
from reprieve.preemption.signals import signal_watch
from reprieve.preemption.stop_listener import ANOTHER_RANK, StopListener
from reprieve.ranks.group import Ranks
from reprieve.session.startup_errors import reporting_startup_errors
from reprieve.settings import Settings, resolve
from reprieve.storage.uri import display_path, run_folder

_ADAPTER = "adapter_model.safetensors"
_OUTCOME = "outcome"
_DONE, _STOPPED, _REFUSED, _FAILED = b"done", b"stopped", b"refused", b"failed"
_POLL_INTERVAL = timedelta(seconds=10)
"""How long a rank waits at a time: a server that does not answer at all is noticed after the next question."""


def run_job(options: FinetuneOptions) -> None:
    """Train until the job is complete. Raises Preempted at a stop."""
    # The init process of a container has no default action for SIGTERM: here it ends at once.
    signal_watch.install([signal.SIGTERM])
    complete_variables(os.environ)
    with reporting_startup_errors():
        settings = resolve({}, options=False)
        output = run_folder(options.output_dir, settings.drill)
        record = _start_record(options, settings, output)
        if record.finished:
            print_once(f"{display_path(output)} is finished: nothing is left to train")
            return
        sources = {
            kind: find_source(kind, text)
            for kind, text in ((MODEL, options.model_name), (DATASET, options.dataset_path))
        }
        with explained(output), permitted(output):
            output.mkdir(parents=True, exist_ok=True)
        use_writable_caches(os.environ, output)
        paths = {kind: _local(source, options, record) for kind, source in sources.items()}
        record = replace(record, commits=_commits(sources, paths))
        check_model(paths[MODEL], options.model_name)
        if options.merge and is_first_rank():
            merge.check_room(output, paths[MODEL])
        if not record.trained:
            with needing("reprieve finetune"):
                rows = read_rows(paths[DATASET], options)
                from reprieve.finetune import training
            trainer = training.make_trainer(options, paths[MODEL], rows, output, date=record.date)
            if is_first_rank():
                record.write(output)
    if not record.trained:
        trained = training.train(trainer, output)
        signal_watch.install([signal.SIGTERM])
        record = replace(record, trained=True)
        if is_first_rank():
            checkpoints = run_folder(settings.checkpoints or output, settings.drill)
            found = summary.summarize(
                trained.log, trained.steps, trained.epochs, summary.count_interruptions(checkpoints)
            )
            summary.write(found, output)
            print("\n".join(summary.lines(found)), flush=True)
            make_durable(output)
            record.write(output)
    _run_on_first_rank(lambda: _complete(options, sources[MODEL], paths[MODEL], record, output))


def _run_on_first_rank(work: Callable[[], None]) -> None:
    """Run the work on rank 0, and let the others wait for it: torchrun starts all ranks of a job or none, and after a
    stop of rank 0, one that had ended with 0 would not come back for the next start."""
    try:
        ranks = Ranks.detect()
    except ConfigError:  # WORLD_SIZE without torchrun, and nothing to train: no rank waits for another
        if is_first_rank():
            work()
        return
    if ranks.world_size == 1:
        work()
    elif ranks.rank == 0:
        _run_for_all(ranks, work)
    else:
        _wait_for_first_rank(ranks)
    ranks.close()


def _run_for_all(ranks: Ranks, work: Callable[[], None]) -> None:
    def stop() -> None:
        with contextlib.suppress(RanksError):
            ranks.store.put_once(_OUTCOME, _STOPPED)
        process_exit.exit_now()

    listener = StopListener(stop, grace=resolve_grace_period())
    listener.start()
    outcome = _FAILED
    try:
        work()
        outcome = _DONE
    except Exception as error:
        outcome = _REFUSED if is_permanent(error) else _FAILED
        raise
    finally:
        listener.close()
        with contextlib.suppress(RanksError):
            ranks.store.put_once(_OUTCOME, outcome)


def _wait_for_first_rank(ranks: Ranks) -> None:
    outcome = None
    try:
        while outcome is None:  # a large model takes long, and a lost host closes the connection
            outcome = ranks.store.wait(_OUTCOME, _POLL_INTERVAL)
    except StoreLost:  # it was killed, or its host is gone
        outcome = _STOPPED
    if outcome == _STOPPED:
        Reporter(ranks.rank, ranks.world_size).send(Stopping(reason=ANOTHER_RANK))
        if is_first_of_node():
            print_message("rank 0 was stopped before it had written the result: the next start does that")
        raise Preempted(ANOTHER_RANK)
    if outcome != _DONE:
        raise RankFailed(0, "could not write the result", permanent=outcome == _REFUSED)


def _complete(
    options: FinetuneOptions, source: Path | HubId, model_folder: Path, record: JobRecord, output: Path
) -> None:
    """Do what remains once the adapter is there."""
    if options.merge:
        merge.merge(output, model_folder, options)
    if isinstance(source, HubId):
        merge.name_base_model(output, source.name, record.commits.get(MODEL))
    replace(record, merged=options.merge or record.merged, finished=True).write(output)
    print_once(f"finished: {display_path(output / (merge.FOLDER if options.merge else _ADAPTER))}")


def _start_record(options: FinetuneOptions, settings: Settings, output: Path) -> JobRecord:
    """Return the record of this start: what an earlier one has pinned, and how far that came."""
    record = JobRecord(options=options.that_matter())
    earlier = read_record(output)
    if earlier is None or _starts_over(settings, output):
        return record
    _check_sources(earlier, record, settings, output)
    trained = earlier.trained and earlier.trains_as(record) and (output / _ADAPTER).is_file()
    merged = earlier.merged and trained and (output / merge.FOLDER).is_dir()
    return replace(
        record,
        commits=earlier.commits if record.sources == earlier.sources else {},
        date=earlier.date,
        trained=trained,
        merged=merged,
        finished=earlier.finished and trained and (merged or not options.merge),
    )


def _check_sources(earlier: JobRecord, record: JobRecord, settings: Settings, output: Path) -> None:
    """Raise ConfigError if a checkpoint of another model or of other data would be continued, or taken for finished."""
    folder = run_folder(settings.checkpoints or output, settings.drill)
    if (name := earlier.other_source(record)) is None or not list_checkpoints(folder):
        return
    raise ConfigError(
        f"{display_path(output)} has checkpoints of --{name} {earlier.options.get(name)}, and not of "
        f"{record.options.get(name)}: choose another --output_dir, or start over with reprieve run --fresh. If it has "
        f"only moved, change its path in {display_path(output / FILE)}"
    )


def _starts_over(settings: Settings, output: Path) -> bool:
    """Whether the training will move its checkpoints away: a request to start over is carried out once, and what was
    trained since then stays."""
    if not (request := settings.start_over()):
        return request is not None
    folder = run_folder(settings.checkpoints or output, settings.drill)
    lease = read_lease(folder / LEASE_FOLDER)
    return lease is None or lease.started_over != request


def _local(source: Path | HubId, options: FinetuneOptions, record: JobRecord) -> Path:
    if isinstance(source, Path):
        return source
    return download(source, commit=record.commits.get(source.kind), local_files_only=options.local_files_only)


def _commits(sources: dict[str, Path | HubId], paths: dict[str, Path]) -> dict[str, str]:
    return {kind: paths[kind].name for kind, source in sources.items() if isinstance(source, HubId)}
