"""Downloads repositories of the hub into its cache: one process of a node at a time, the others wait for it.

The first process downloads while it holds a lock in the cache, and those after it find everything there. HF_TOKEN is
read from the environment alone, and shown nowhere. What was downloaded is recorded (`job_record.py`), so that a run
resumes with the same commit, even if the repository has changed meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reprieve.errors import ConfigError, ReprieveError, needing
from reprieve.finetune.sources import DATASET, MODEL, HubId, weight_files
from reprieve.launch.messages import print_message

_OTHER_FORMATS = ["*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.ot", "original/*", "onnx/*"]
"""Weights beside the safetensors: twice the bytes, and pickles."""
_REFUSED = {
    401: "it is wrong or has expired. Set HF_TOKEN to a token of https://huggingface.co/settings/tokens",
    403: "it may not read this. Accept the conditions there, and allow a fine-grained token to read gated repositories",
}
"""HTTP's codes for a request that this token will never be allowed."""
_PICKLED_WEIGHTS = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]


class DownloadFailed(ReprieveError):
    """The hub could not be reached, or broke off: the next start may succeed."""


def download(
    repository: HubId, *, commit: str | None, local_files_only: bool, env: Mapping[str, str] = os.environ
) -> Path:
    """Return the folder of a repository's snapshot. `commit`: that of an earlier start of this job."""
    with needing("reprieve finetune"):
        from huggingface_hub import constants
    offline = local_files_only or constants.HF_HUB_OFFLINE
    with contextlib.nullcontext() if offline else _one_at_a_time(Path(constants.HF_HUB_CACHE), repository):
        ignored = _OTHER_FORMATS if repository.kind == MODEL else []
        folder = _fetch(repository, commit, env, offline=offline, ignore_patterns=ignored)
        if repository.kind == MODEL and not offline and not weight_files(folder):
            _fetch(repository, commit or folder.name, env, offline=offline, allow_patterns=_PICKLED_WEIGHTS)
    return folder


def _fetch(repository: HubId, commit: str | None, env: Mapping[str, str], *, offline: bool, **patterns: Any) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    token = env.get("HF_TOKEN", "").strip()
    name, option = repository.name, "--model_name" if repository.kind == MODEL else "--dataset_path"
    page = f"https://huggingface.co/{'datasets/' if repository.kind == DATASET else ''}{name}"
    try:
        found = huggingface_hub.snapshot_download(
            name,
            repo_type=repository.kind,
            revision=commit or repository.revision,
            token=token or False,
            local_files_only=offline,
            **patterns,
        )
    except errors.GatedRepoError:
        what = "HF_TOKEN has no access to it" if token else "HF_TOKEN is not set"
        raise ConfigError(
            f"{option} {name} is gated, and {what}: accept its conditions at {page}, and set HF_TOKEN to a token of "
            "that account"
        ) from None
    except errors.RepositoryNotFoundError:
        what = "HF_TOKEN has no access to it" if token else "it is private (set HF_TOKEN)"
        raise ConfigError(f"{option} {name}: the hub has no such {repository.kind}, or {what}. Check {page}") from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{option} {name} has no revision {commit or repository.revision}: see {page}") from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{option} {name} is no hub id: {error}") from None
    except (errors.HfHubHTTPError, OSError) as error:
        if offline:
            raise _not_in_cache(option, name) from error
        if (status := _status(error)) in _REFUSED:
            what = f"refuses HF_TOKEN: {_REFUSED[status]}" if token else "wants a token: set HF_TOKEN"
            raise ConfigError(f"{option} {name}: the hub {what} ({status}). See {page}") from error
        raise DownloadFailed(f"{name} cannot be downloaded: {_first_line(error)}") from error
    return Path(found)


def _status(error: BaseException | None) -> int | None:
    """Return the HTTP code that the hub answered with, also where the library looked into its cache afterwards."""
    from huggingface_hub.errors import HfHubHTTPError

    while error is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    return None if error is None else int(error.response.status_code)


def _not_in_cache(option: str, name: str) -> ConfigError:
    from huggingface_hub import constants

    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "--local_files_only is given"
    return ConfigError(
        f"{option} {name} is neither a folder here nor complete in {constants.HF_HUB_CACHE}, and nothing is downloaded "
        f"because {why}: give the folder, copy the cache there (HF_HUB_CACHE), or allow the download"
    )


@contextlib.contextmanager
def _one_at_a_time(cache: Path, repository: HubId) -> Iterator[None]:
    """Hold the cache's lock for a repository. Where files cannot be locked, huggingface_hub's own locks remain."""
    path = cache / ".locks" / f"reprieve-{repository.kind}--{repository.name.replace('/', '--')}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            _lock(lock, repository.name)
        yield
    finally:
        os.close(lock)


def _lock(lock: int, name: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock, fcntl.LOCK_EX)
    else:
        print_message(f"looking up {name} on the hub")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
