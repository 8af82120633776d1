"""`TransformersTrainer`: the trainer of the Kubeflow SDK whose jobs save when they are stopped, and resume.

    TransformersTrainer → TrainerClient.train → job_options.py (Kubernetes) | backends.py (other backends)

Fields, defaults and checks are those of Red Hat's SDK, and what is ours on top. Everything is checked at construction.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from kubeflow.trainer import CustomTrainer

from reprieve._version import __version__
from reprieve.errors import ConfigError
from reprieve.kubernetes import checkpointing
from reprieve.kubernetes.checkpointing import SAVE_TYPES, Checkpointing
from reprieve.kubernetes.environment import add_environment
from reprieve.kubernetes.fields import OBJECT_NAME
from reprieve.kubernetes.pods import Pods
from reprieve.sdk.command import function_source
from reprieve.sdk.request import StartRequest
from reprieve.sdk.training_function import TrainingFunction
from reprieve.settings import SETTINGS
from reprieve.submitted_arguments import SubmittedArguments
from reprieve.units import parse_duration

STRATEGIES = ("steps", "epoch", "no")
PORTS = range(1024, 65536)
POLL_INTERVALS_S = range(5, 301)
METRICS_PORT = SETTINGS["metrics_port"].env
WHERE = "TransformersTrainer"
CLIENT = "from reprieve.kubeflow import TrainerClient"

Duration = str | float | timedelta


@dataclass(frozen=True)
class PeriodicCheckpointConfig:
    """When checkpoints are saved while nothing stops the job.

    They replace `save_strategy`, `save_steps` and `save_total_limit` of the script's TrainingArguments.
    """

    save_strategy: str = "epoch"
    """`steps`, `epoch` or `no`."""
    save_steps: int | None = None
    """For `steps`."""
    save_total_limit: int | None = 3
    """How many checkpoints to keep. None: the script's limit, or 3."""
    save_interval: Duration | None = None
    """Save also after so much time (`"10m"`), whatever the strategy: the most that a kill without notice can lose."""

    def __post_init__(self) -> None:
        if self.save_strategy not in STRATEGIES:
            raise ConfigError(f"save_strategy={self.save_strategy!r}: write steps, epoch or no")
        if self.save_strategy == "steps" and self.save_steps is None:
            raise ConfigError('save_strategy="steps" needs save_steps: how many steps lie between two checkpoints')
        _check_count("save_steps", self.save_steps)
        _check_count("save_total_limit", self.save_total_limit)
        _seconds("save_interval", self.save_interval)


@dataclass
class TransformersTrainer(CustomTrainer):
    """Trains with a function that uses transformers, TRL or `reprieve.Run`, and saves when the job is stopped."""

    enable_progression_tracking: bool = True
    """Serve progress on `metrics_port`, and let Red Hat's controller poll it."""
    metrics_port: int = 28080
    metrics_poll_interval_seconds: int = 30
    """How often that controller polls. Reprieve's operator decides by itself."""
    enable_jit_checkpoint: bool = False
    """Save on SIGTERM, and resume. True as soon as there is an `output_dir` or a `periodic_checkpoint_config`."""
    output_dir: str | None = None
    """`pvc://CLAIM/FOLDER`, `s3://BUCKET/PREFIX` or a folder of the pod; replaces the one of the script."""
    periodic_checkpoint_config: PeriodicCheckpointConfig | None = None
    """None: the script decides, and there is a checkpoint at least every 5 minutes."""
    data_connection_name: str | None = None
    """A Secret, which pods get as files: of an object store in `output_dir`, or for the function."""
    verify_cloud_storage_access: bool = True
    """Accepted. This version does not write to object stores."""
    verify_cloud_storage_ssl: bool = True
    """Accepted, as above."""
    grace_period: Duration | None = None
    """How long pods may take to save. Default: what the runtime gives them."""
    fallback_dir: str | None = None
    """`pvc://CLAIM/FOLDER`: where checkpoints go instead of an object store."""
    save_type: str = "full"
    kill_wait: Duration | None = None
    """How long to train on after SIGTERM before saving."""
    reprieve: str = f"reprieve=={__version__}"
    """What pip installs where the image has no Reprieve: a requirement, or the path or URL of a wheel."""

    function: TrainingFunction = field(init=False, repr=False, compare=False)
    """`func` as it was given."""
    current_folder: Path = field(init=False, repr=False, compare=False)
    """Of this process, now: LocalProcess changes it while a job runs."""

    def __post_init__(self) -> None:
        self.current_folder = Path.cwd()
        self.function = TrainingFunction.of(self.func, self.func_args)
        _check_kind("packages_to_install", self.packages_to_install, (list, tuple), "a list of requirements")
        _check_kind("pip_index_urls", self.pip_index_urls, (list, tuple), "a list of URLs")
        _check_kind("output_dir", self.output_dir or None, str, "a text, such as 'pvc://CLAIM/FOLDER'")
        _check_kind("fallback_dir", self.fallback_dir, str, "a text, such as 'pvc://CLAIM/FOLDER'")
        _check_kind("data_connection_name", self.data_connection_name, str, "the name of a Secret")
        periodic = self.periodic_checkpoint_config
        _check_kind("periodic_checkpoint_config", periodic, PeriodicCheckpointConfig, "PeriodicCheckpointConfig(...)")
        _check_number("metrics_port", self.metrics_port, PORTS)
        _check_number("metrics_poll_interval_seconds", self.metrics_poll_interval_seconds, POLL_INTERVALS_S)
        if self.save_type not in SAVE_TYPES:
            raise ConfigError(f"save_type={self.save_type!r}: write {' or '.join(SAVE_TYPES)}")
        if self.data_connection_name and not OBJECT_NAME.fullmatch(self.data_connection_name):
            raise ConfigError(f"data_connection_name={self.data_connection_name!r} is not the name of a Secret")
        for name in ("grace_period", "kill_wait"):
            _seconds(name, getattr(self, name))
        if self.output_dir is not None or periodic is not None:
            self.enable_jit_checkpoint = True
        self.settings()
        self.request().pack()
        self.func: Callable[..., Any] = self.function.with_source(self._source)

    def checked_again(self) -> TransformersTrainer:
        """Return a copy with the fields that the trainer has now: a notebook may have changed them since."""
        found = replace(self)
        found.current_folder = self.current_folder
        return found

    @property
    def needs_volume(self) -> bool:
        """Whether `output_dir` is not a plain folder. Only our client can mount what it needs."""
        return self.output_dir is not None and "://" in self.output_dir

    @property
    def lacks_claim(self) -> bool:
        """Whether `output_dir` is an object store without a claim that takes its place. No job is submitted then."""
        return self.fallback_dir is None and (self.output_dir or "").startswith("s3://")

    def without_claim(self) -> ConfigError:
        return ConfigError(
            f"output_dir={self.output_dir!r}: this version does not write to object stores yet: name a claim that "
            f"takes the checkpoints instead, fallback_dir='pvc://CLAIM/FOLDER' (it is {self.fallback_dir!r})"
        )

    def settings(self) -> Checkpointing | None:
        """Return the settings of the TrainJob; None: it is not protected.

        Their `uri` is empty where only the script knows the folder, or its current folder does.
        """
        if not self.enable_jit_checkpoint:
            return None
        periodic = self.periodic_checkpoint_config
        if periodic is None:
            interval = checkpointing.INTERVAL
        else:
            seconds = _seconds("save_interval", periodic.save_interval)
            interval = "never" if seconds is None else _format(seconds)
        content: dict[str, Any] = {
            **self._storage(),
            "interval": interval,
            "maxCheckpoints": (periodic.save_total_limit if periodic else None) or checkpointing.MAX_CHECKPOINTS,
            "saveType": self.save_type,
        }
        for name, setting in (("grace_period", "gracePeriod"), ("kill_wait", "killWait")):
            if (seconds := _seconds(name, getattr(self, name))) is not None:
                content[setting] = _format(seconds)
        if content["storage"].get("uri"):
            return checkpointing.parse(content, WHERE)
        content["storage"]["uri"] = "/unknown"
        return replace(checkpointing.parse(content, WHERE), uri="")

    def environment(self) -> dict[str, str]:
        """Return the settings as variables, for processes that no TrainJob of our client starts."""
        container: dict[str, Any] = {}
        if (settings := self.settings()) is not None:
            add_environment(container, settings, Pods({}, None))
        found = {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}
        for name in ("TRAINING_PROGRESS_FILE", "REPRIEVE_CREDENTIALS_DIR"):
            found.pop(name, None)  # one for all jobs of a machine; only our client mounts a Secret
        return {**found, METRICS_PORT: str(self.metrics_port) if self.enable_progression_tracking else "off"}

    def request(self, *, run: str = "", starts_launcher: bool = True, installs: bool = True) -> StartRequest:
        """Return what a pod needs to know. `run`: identifies the run where nothing else does."""
        settings, periodic = self.settings(), self.periodic_checkpoint_config
        return StartRequest(
            name=self.function.name,
            source=self.function.source,
            arguments=self.function.arguments,
            has_text_annotations=self.function.has_text_annotations,
            run=run,
            packages=tuple(self.packages_to_install or ()) if installs else (),
            index_urls=tuple(self.pip_index_urls or ()),
            reprieve=self.reprieve,
            submitted=SubmittedArguments(
                output_dir=(settings.folder if settings is not None else "") or self.output_dir,
                save_strategy=periodic.save_strategy if periodic else None,
                save_steps=periodic.save_steps if periodic else None,
                save_total_limit=self._limit(),
                protected=settings is not None,
            ),
            starts_launcher=starts_launcher,
            environment={} if starts_launcher else self.environment(),
        )

    def _limit(self) -> int | None:
        """Return how many checkpoints to keep; None: the script decides. A variable of the user's wins over it."""
        periodic, own = self.periodic_checkpoint_config, (self.env or {}).get(SETTINGS["keep"].env, "")
        if periodic is not None and periodic.save_total_limit is not None:
            return periodic.save_total_limit
        return int(own) if own.isdigit() else None

    def _source(self) -> str:
        """What the Kubeflow SDK submits as the source of `func`, if not our client does it."""
        trainer = self.checked_again()
        if trainer.needs_volume:
            raise ConfigError(
                f"output_dir={trainer.output_dir} needs a volume, which only Reprieve's client adds to the job: "
                f"{CLIENT}"
            )
        return function_source(trainer.request(starts_launcher=False, installs=False))

    def _storage(self) -> dict[str, Any]:
        secret = {"secretRef": {"name": self.data_connection_name}} if self.data_connection_name else {}
        uri = self.output_dir
        if self.fallback_dir is not None and not (uri or "").startswith("s3://"):
            raise ConfigError(
                f"fallback_dir={self.fallback_dir!r} takes the place of an object store, and output_dir={uri!r} is "
                "none: leave it out"
            )
        if uri is None:
            return {"storage": secret}
        if not uri:
            raise ConfigError("output_dir='' names no folder: write pvc://CLAIM/FOLDER, or leave it out")
        scheme, separator, rest = uri.partition("://")
        if not separator:
            return {"storage": {"uri": uri if uri.startswith("/") else "", **secret}}
        if scheme == "pvc":
            if not OBJECT_NAME.fullmatch(rest.partition("/")[0]):
                raise ConfigError(f"output_dir={uri!r} names no claim: write pvc://CLAIM/FOLDER")
            return {"storage": {"uri": uri, **secret}}
        if scheme != "s3":
            raise ConfigError(f"output_dir={uri!r}: {scheme}:// is not known: write pvc://CLAIM/FOLDER, or a folder")
        if not rest.partition("/")[0]:
            raise ConfigError(f"output_dir={uri!r} names no bucket: write s3://BUCKET/PREFIX")
        if not self.data_connection_name:
            raise ConfigError(
                f"output_dir={uri!r} needs data_connection_name, the Secret with the credentials: "
                "kubectl get secrets -l opendatahub.io/dashboard=true lists those of OpenShift AI"
            )
        if self.fallback_dir is None:
            return {"storage": {"uri": uri, **secret}, "persistentVolume": {"claimName": "unknown"}}
        claim, _, folder = self.fallback_dir.removeprefix("pvc://").partition("/")
        if not self.fallback_dir.startswith("pvc://") or not OBJECT_NAME.fullmatch(claim):
            raise self.without_claim()
        volume: dict[str, Any] = {"claimName": claim}
        if folder := posixpath.normpath(folder.strip("/")) if folder.strip("/") else "":
            volume["subPath"] = folder
        return {"storage": {"uri": uri, **secret}, "persistentVolume": volume}


def _check_kind(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}={value!r}: write {wanted}")


def _check_number(name: str, value: object, allowed: range) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
        raise ConfigError(f"{name}={value!r}: write a number from {allowed[0]} to {allowed[-1]}")


def _check_count(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{name}={value!r}: write a whole number from 1 on")


def _format(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def _seconds(name: str, value: Duration | None) -> float | None:
    if value is None or value in (0, timedelta(0), "0", "0s"):
        return None
    try:
        return parse_duration(value).total_seconds()
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
