"""`TrainerClient`: the Kubeflow SDK's client, with pause, resume, progress, checkpoints and wait.

    train(trainer=TransformersTrainer(…)) → a CustomTrainer and an option, which comes last → the SDK's backend
    pause, resume, progress, checkpoints, wait → TrainJobs (Kubernetes) | LocalJobs (LocalProcess)

Other trainers and all other calls are the SDK's own.
"""

from __future__ import annotations

import functools
import logging
import posixpath
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from kubeflow.trainer import CustomTrainer, Runtime
from kubeflow.trainer import TrainerClient as SdkClient
from kubeflow.trainer.backends.kubernetes.backend import KubernetesBackend
from kubeflow.trainer.backends.localprocess.backend import LocalProcessBackend
from kubeflow.trainer.constants.constants import DEFAULT_TRAINING_RUNTIME, WORKSPACE_PATH

from reprieve.errors import ConfigError, KubernetesError, NotPermitted, ObjectNotFound
from reprieve.kubernetes.jobs.state import JobState
from reprieve.kubernetes.kinds import CLUSTER_TRAINING_RUNTIME, TRAINING_RUNTIME
from reprieve.kubernetes.names import RUNTIME
from reprieve.kubernetes.runtime import Runtime as StoredRuntime
from reprieve.sdk.command import function_source
from reprieve.sdk.job_options import JobOptions
from reprieve.sdk.request import StartRequest
from reprieve.sdk.sdk_cluster import SdkCluster
from reprieve.sdk.trainer import TransformersTrainer
from reprieve.units import parse_duration

if TYPE_CHECKING:
    from reprieve.kubernetes.jobs.job_view import JobView
    from reprieve.kubernetes.jobs.train_jobs import PauseOutcome
    from reprieve.kubernetes.jobs.training_progress import AvailableCheckpoint

log = logging.getLogger("reprieve")

WHO = "reprieve.kubeflow"
_REPRIEVE = re.compile(r"\s*reprieve(?![\w.-])", re.IGNORECASE)
"""How a requirement of Reprieve begins, whatever extras, version or URL it has."""


class JobFailed(KubernetesError):
    """A job that was waited for has failed."""


class Jobs(Protocol):
    """The verbs that both kinds of jobs have."""

    def get(self, name: str) -> JobView: ...

    def pause(
        self, name: str, *, reason: str = "", wait: bool = True, timeout: timedelta | None = None
    ) -> PauseOutcome: ...

    def resume(self, name: str) -> JobView: ...

    def wait(
        self,
        name: str,
        condition: Callable[[JobView], bool],
        *,
        timeout: timedelta | None = None,
        interval_s: float = ...,
    ) -> JobView: ...

    def checkpoints(self, name: str) -> tuple[AvailableCheckpoint, ...]: ...


class TrainerClient(SdkClient):
    """Submits training functions, and looks after the jobs."""

    def train(
        self,
        runtime: str | Runtime | None = None,
        initializer: Any = None,
        trainer: Any = None,
        options: list[Any] | None = None,
    ) -> str:
        """Create a job, and return its name. With a `TransformersTrainer` it saves when it is stopped, and resumes."""
        if isinstance(trainer, TransformersTrainer):
            trainer = trainer.checked_again()
            if trainer.lacks_claim:
                raise trainer.without_claim()
            if isinstance(self.backend, KubernetesBackend):
                runtime = self._runtime(runtime)
                option: Any = JobOptions(trainer, runtime.name, self._stored_runtime(runtime))
                request = trainer.request()
            elif isinstance(self.backend, LocalProcessBackend):
                from reprieve.sdk.local_jobs import LocalOptions, local_trainer  # costly, and not for clusters

                trainer = local_trainer(trainer)
                option = LocalOptions(trainer)
                request = trainer.request(installs=False)
            else:
                _warn_about_containers(trainer)
                option = None
                request = trainer.request(starts_launcher=False, installs=False)
            options = [*(options or ()), *([option] if option is not None else [])]
            trainer = self._submitted(trainer, request)
        name: str = super().train(runtime=runtime, initializer=initializer, trainer=trainer, options=options)
        return name

    def pause(
        self, job: str, *, reason: str = "", wait: bool = True, timeout: str | float | timedelta | None = None
    ) -> PauseOutcome:
        """Save a job, stop it, and wait until all its pods have stopped."""
        return self._jobs.pause(job, reason=reason, wait=wait, timeout=_duration(timeout))

    def resume(self, job: str) -> JobView:
        """Undo a pause: the job starts again, at the step where it stopped."""
        return self._jobs.resume(job)

    @overload
    def progress(self, job: str, follow: Literal[False] = False) -> JobView: ...

    @overload
    def progress(self, job: str, follow: Literal[True]) -> Iterator[JobView]: ...

    def progress(self, job: str, follow: bool = False) -> JobView | Iterator[JobView]:
        """Return state and progress of a job; with `follow`, each change of them until the job ends."""
        return self._follow(job) if follow else self._jobs.get(job)

    def checkpoints(self, job: str) -> tuple[AvailableCheckpoint, ...]:
        """Return the checkpoints of a job, newest first, as it has last reported them."""
        return self._jobs.checkpoints(job)

    def wait(self, job: str, *, timeout: str | float | timedelta | None = None) -> JobView:
        """Wait until a job has succeeded, over all its restarts, and return it. JobFailed: it has failed."""
        view = self._jobs.wait(job, lambda view: view.state.is_end, timeout=_duration(timeout))
        if view.state == JobState.FAILED:
            raise JobFailed(f"{job} has failed: {view.reason or 'see its log'}")
        return view

    @functools.cached_property
    def _jobs(self) -> Jobs:
        if isinstance(self.backend, KubernetesBackend):
            from reprieve.kubernetes.jobs.train_jobs import TrainJobs  # only the verbs need it, not each import

            return TrainJobs(self._cluster, by=WHO)
        if isinstance(self.backend, LocalProcessBackend):
            from reprieve.sdk.local_jobs import LocalJobs  # costly, and not for clusters

            return LocalJobs(self.backend)
        raise ConfigError(
            "the Container backend can neither pause jobs nor read their progress: use Kubernetes or LocalProcess"
        )

    @property
    def _cluster(self) -> SdkCluster:
        return SdkCluster(self.backend.custom_api.api_client, self.backend.namespace)

    def _follow(self, job: str) -> Iterator[JobView]:
        view = self._jobs.get(job)
        yield view
        while not view.state.is_end:
            shown = _shown(view)
            view = self._jobs.wait(job, lambda now, shown=shown: _shown(now) != shown)  # type: ignore[misc]
            yield view

    def _runtime(self, runtime: str | Runtime | None) -> Runtime:
        if runtime is None or isinstance(runtime, str):
            runtime = self.backend.get_runtime(runtime or DEFAULT_TRAINING_RUNTIME)
        if runtime.trainer.command[0] == "mpirun":
            # The command of the job, which is ours, would replace mpirun: one rank would train alone.
            raise ConfigError(
                f"runtime {runtime.name} starts ranks with mpirun, and a TransformersTrainer needs torchrun: write "
                f"runtime={RUNTIME!r}"
            )
        return runtime

    def _stored_runtime(self, runtime: Runtime) -> StoredRuntime | None:
        """Return the runtime with what the SDK's own class leaves out: grace period, volumes, failure policy."""
        kind = TRAINING_RUNTIME if runtime.kind.value == TRAINING_RUNTIME.name else CLUSTER_TRAINING_RUNTIME
        try:
            return StoredRuntime(self._cluster.get(kind, runtime.name))
        except (NotPermitted, ObjectNotFound):
            return None

    def _submitted(self, trainer: TransformersTrainer, request: StartRequest) -> CustomTrainer:
        """Return what the backend gets: a function without arguments, which runs the request."""
        packages = None
        if not isinstance(self.backend, KubernetesBackend):  # there, the bootstrap installs them
            packages = [*(trainer.packages_to_install or ())]
            if not any(_REPRIEVE.match(each) for each in packages):
                packages.insert(0, _named(trainer.reprieve))  # the backend refuses a package that is named twice
        return CustomTrainer(
            func=trainer.function.with_source(lambda: function_source(request)),
            image=trainer.image,
            packages_to_install=packages,
            pip_index_urls=trainer.pip_index_urls,
            num_nodes=trainer.num_nodes,
            resources_per_node=trainer.resources_per_node,
            env=dict(trainer.env) if trainer.env else None,
        )


def _named(requirement: str) -> str:
    """Return a requirement that begins with its name, as the SDK's other backends need it, also for a wheel."""
    if "/" not in requirement or "@" in requirement:
        return requirement
    return f"reprieve @ {requirement if '://' in requirement else Path(requirement).absolute().as_uri()}"


def _shown(view: JobView) -> dict[str, Any]:
    """What a change of is worth showing."""
    content = view.to_json()
    content["progress"].pop("lastUpdateTime", None)
    return content


def _duration(value: str | float | timedelta | None) -> timedelta | None:
    return None if value is None else parse_duration(value)


def _warn_about_containers(trainer: TransformersTrainer) -> None:
    log.warning(
        "the Container backend does not pass SIGTERM on, and kills containers after 10 s: a job that is stopped loses "
        "what it did after its last periodic checkpoint"
    )
    folder = trainer.request().submitted.output_dir
    if folder is None:
        return
    if folder.startswith("~") or not posixpath.join(WORKSPACE_PATH, folder).startswith(f"{WORKSPACE_PATH}/"):
        log.warning(
            "checkpoints in %s are lost with the container: only %s is a folder of this machine. Write "
            "output_dir='checkpoints'",
            folder,
            WORKSPACE_PATH,
        )
