"""What `TransformersTrainer` refuses, and what it asks for."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubeflow.trainer import CustomTrainer
from numpy import float64

from reprieve.kubeflow import PeriodicCheckpointConfig, TransformersTrainer
from reprieve.sdk.local_jobs import local_trainer
from reprieve.sdk.pod import add_environment
from reprieve.sdk.request import StartRequest


def train_func(learning_rate: float = 0.1, names: Any = ()) -> tuple[float, Any]:
    return learning_rate, names


def closure() -> Callable[[], object]:
    model, folder = "gpt2", "/data"

    def train_func() -> object:
        return model, folder

    return train_func


def nested() -> Callable[[], object]:
    def train_func() -> object:
        return """
  less indented
"""

    return train_func


class Trains:
    def method(self) -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def coroutine() -> None: ...


def made_without_source() -> Callable[[], None]:
    found: dict[str, Any] = {}
    exec("def train_func(): pass", found)
    return found["train_func"]  # type: ignore[no-any-return]


def recursive() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def test_fields_and_defaults_are_those_of_the_other_sdk() -> None:
    found = {each.name: getattr(TransformersTrainer(func=train_func), each.name) for each in fields()}
    expected = {
        "func_args": None, "packages_to_install": None, "num_nodes": None, "resources_per_node": None, "env": None,
        "enable_progression_tracking": True, "metrics_port": 28080, "metrics_poll_interval_seconds": 30,
        "enable_jit_checkpoint": False, "output_dir": None, "periodic_checkpoint_config": None,
        "data_connection_name": None, "verify_cloud_storage_access": True, "verify_cloud_storage_ssl": True,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    config = PeriodicCheckpointConfig()
    assert (config.save_strategy, config.save_steps, config.save_total_limit) == ("epoch", None, 3)


def fields() -> list[Any]:
    return [each for each in dataclasses.fields(TransformersTrainer) if each.init]


def test_it_is_a_custom_trainer_whose_function_can_be_called() -> None:
    trainer = TransformersTrainer(func=train_func, func_args={"learning_rate": 0.5})
    assert isinstance(trainer, CustomTrainer)
    assert trainer.func(0.2, names=[1]) == (0.2, [1])
    assert trainer.func.__name__ == "train_func"


def test_a_trainer_can_be_copied_with_changes() -> None:
    trainer = dataclasses.replace(TransformersTrainer(func=train_func, output_dir="pvc://shared/a"), num_nodes=4)
    assert (trainer.num_nodes, trainer.function.original) == (4, train_func)


def test_fields_that_are_changed_later_count() -> None:
    values = [1]
    trainer = TransformersTrainer(func=train_func, func_args={"names": values})
    values.append(2)
    trainer.output_dir = "/x"
    trainer.metrics_port = 28081
    found = trainer.checked_again()
    assert found.request().arguments == "{'names': [1, 2]}"
    assert found.enable_jit_checkpoint and found.request().submitted.output_dir == "/x"
    trainer.func_args = {"unknown": 1}
    with pytest.raises(ValueError, match="cannot be called with func_args="):
        inspect.getsource(trainer.func)


BAD_INPUT: dict[str, dict[str, Any]] = {
    "metrics_port=80: write a number from 1024 to 65535": {"metrics_port": 80},
    "metrics_port=65536: write a number from 1024 to 65535": {"metrics_port": 65536},
    "metrics_port=True": {"metrics_port": True},
    "metrics_poll_interval_seconds=4: write a number from 5 to 300": {"metrics_poll_interval_seconds": 4},
    "metrics_poll_interval_seconds=301": {"metrics_poll_interval_seconds": 301},
    "gs:// is not known: write pvc://CLAIM/FOLDER": {"output_dir": "gs://bucket/x"},
    "names no claim: write pvc://CLAIM/FOLDER": {"output_dir": "pvc://"},
    "names no claim": {"output_dir": "pvc:///folder"},
    "needs data_connection_name": {"output_dir": "s3://bucket/x"},
    "fallback_dir='pvc://CLAIM/FOLDER'": {
        "output_dir": "s3://bucket/x",
        "data_connection_name": "c",
        "fallback_dir": "/x",
    },
    "fallback_dir='pvc://x' takes the place of an object store": {"output_dir": "/x", "fallback_dir": "pvc://x"},
    "names no bucket: write s3://BUCKET/PREFIX": {"output_dir": "s3:///run"},
    "output_dir='' names no folder": {"output_dir": ""},
    "write a text, such as 'pvc://CLAIM/FOLDER'": {"output_dir": Path("/x")},
    r"write PeriodicCheckpointConfig\(\.\.\.\)": {"periodic_checkpoint_config": {"save_steps": 5}},
    "packages_to_install='torch': write a list of requirements": {"packages_to_install": "torch"},
    "write a list of URLs": {"pip_index_urls": "https://example.com"},
    "data_connection_name='a b' is not the name of a Secret": {"data_connection_name": "a b"},
    "data_connection_name=5: write the name of a Secret": {"data_connection_name": 5},
    "fallback_dir=5: write": {"fallback_dir": 5},
    "save_type='half': write full or incremental": {"save_type": "half"},
    "grace_period: 'soon' is not a duration": {"grace_period": "soon"},
    "kill_wait: the duration -1 must be more than zero": {"kill_wait": -1, "output_dir": "/x"},
    "it leaves nothing of the grace period": {"grace_period": 10, "kill_wait": 20, "output_dir": "/x"},
    "func is a lambda": {"func": lambda: None},
    "variables of the function around it, which pods do not have: folder, model": {"func": closure()},
    "is not a function: define one with def": {"func": functools.partial(train_func, 1)},
    "func=<built-in function print> is not a function": {"func": print},
    "Trains.> is not a function": {"func": Trains},
    "cannot be called with func_args={}: missing a required argument: 'self'": {"func": Trains.method},
    "func=generator is async or a generator, and a call of it runs nothing": {"func": generator},
    "func=coroutine is async or a generator": {"func": coroutine},
    "the source of func=train_func cannot be read": {"func": made_without_source()},
    r"func_args\['names'\] is a object, which cannot travel": {"func_args": {"names": object()}},
    r"func_args\['names'\]\[1\]\['a'\] is a function": {"func_args": {"names": [1, {"a": train_func}]}},
    r"is a float64, which cannot travel .* float\(…\)": {"func_args": {"names": float64(1)}},
    "is a PosixPath, which cannot travel": {"func_args": {"names": Path("/x")}},
    "contains itself": {"func_args": {"names": recursive()}},
    "write a dictionary of arguments by name": {"func_args": ["a"]},
    "cannot be called with func_args={'unknown': 1}": {"func_args": {"unknown": 1}},
}
"""By what the message says: a part of it, as a regular expression."""


@pytest.mark.parametrize(("message", "options"), BAD_INPUT.items(), ids=BAD_INPUT)
def test_bad_input_is_refused_with_the_way_out(message: str, options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        TransformersTrainer(**{"func": train_func, **options})


@pytest.mark.parametrize(("port", "interval"), [(1024, 5), (65535, 300)])
def test_the_bounds_are_accepted(port: int, interval: int) -> None:
    trainer = TransformersTrainer(func=train_func, metrics_port=port, metrics_poll_interval_seconds=interval)
    assert trainer.environment()["REPRIEVE_METRICS_PORT"] == str(port)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_strategy": "steps"}, "needs save_steps"),
        ({"save_strategy": "best"}, "write steps, epoch or no"),
        ({"save_strategy": "steps", "save_steps": 0}, "save_steps=0: write a whole number"),
        ({"save_total_limit": -1}, "save_total_limit=-1"),
        ({"save_interval": "often"}, "save_interval: 'often' is not a duration"),
    ],
    ids=str,
)
def test_a_bad_schedule_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PeriodicCheckpointConfig(**options)


def test_a_function_that_is_too_long_for_a_command_is_refused() -> None:
    random_text = random.Random(1).randbytes(70_000).hex()
    with pytest.raises(ValueError, match=r"func=train_func takes \d+ KB packed .* may have 90 KB"):
        TransformersTrainer(func=train_func, func_args={"names": random_text * 2})


def test_arguments_keep_their_types() -> None:
    values = {"a": (1, 2.5, float("inf")), "b": {1, 2}, 3: None, "c": [b"x", True, "$é`\\"]}
    request = TransformersTrainer(func=train_func, func_args={"names": values}).request()
    assert eval(request.arguments, {"inf": float("inf")}) == {"names": values}


def test_a_function_inside_another_keeps_its_source_as_it_is() -> None:
    request = TransformersTrainer(func=nested()).request()
    assert request.source.startswith("    def train_func") and "\n  less indented\n" in request.source


def test_settings_follow_from_the_fields() -> None:
    trainer = TransformersTrainer(
        func=train_func,
        output_dir="pvc://shared/run",
        periodic_checkpoint_config=PeriodicCheckpointConfig(
            save_strategy="steps", save_steps=20, save_total_limit=2, save_interval=timedelta(minutes=10)
        ),
        grace_period="90s",
        kill_wait=1.5,
        data_connection_name="keys",
    )
    settings = trainer.settings()
    assert settings is not None and settings.volume is not None
    assert (settings.uri, settings.volume.claim) == ("/mnt/kubeflow-checkpoints/run", "shared")
    assert (settings.max_checkpoints, settings.secret) == (2, "keys")
    assert (settings.grace_period, settings.kill_wait) == (timedelta(seconds=90), timedelta(seconds=1.5))
    assert settings.interval == "600000ms"
    submitted = trainer.request().submitted
    assert (submitted.output_dir, submitted.save_strategy, submitted.save_steps, submitted.save_total_limit) == (
        "/mnt/kubeflow-checkpoints/run", "steps", 20, 2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "is_protected"),
    [
        ({}, False),
        ({"enable_jit_checkpoint": True}, True),
        ({"output_dir": "/x"}, True),
        ({"output_dir": "/x", "enable_jit_checkpoint": False}, True),
        ({"periodic_checkpoint_config": PeriodicCheckpointConfig()}, True),
    ],
    ids=str,
)
def test_a_job_is_protected_if_a_field_asks_for_it(options: dict[str, Any], is_protected: bool) -> None:
    trainer = TransformersTrainer(func=train_func, **options)
    assert (trainer.enable_jit_checkpoint, trainer.request().submitted.protected) == (is_protected, is_protected)


def test_an_object_store_falls_back_to_a_claim() -> None:
    settings = TransformersTrainer(
        func=train_func, output_dir="s3://bucket/run", data_connection_name="keys", fallback_dir="pvc://shared/sub"
    ).settings()
    assert settings is not None and settings.volume is not None
    assert settings.folder == "/mnt/kubeflow-checkpoints/run"
    assert (settings.volume.claim, settings.volume.sub_path) == ("shared", "sub")


@pytest.mark.parametrize(
    "storage",
    [
        {"output_dir": "pvc://shared/run"},
        {"output_dir": "s3://bucket/run", "data_connection_name": "keys", "fallback_dir": "pvc://shared/x"},
        {"output_dir": "s3://bucket/run", "data_connection_name": "keys"},
    ],
    ids=str,
)
def test_the_sdks_own_client_cannot_submit_what_needs_a_volume(storage: dict[str, Any]) -> None:
    trainer = TransformersTrainer(func=train_func, **storage)
    with pytest.raises(ValueError, match=r"from reprieve\.kubeflow import TrainerClient"):
        inspect.getsource(trainer.func)


def test_the_source_is_that_of_the_fields_now() -> None:
    """For the SDK's own client, which reads it at each submission."""
    trainer = TransformersTrainer(func=train_func, output_dir="/a")
    sources = {inspect.getsource(trainer.func)}
    trainer.output_dir = "/b"
    sources.add(inspect.getsource(trainer.func))
    assert len(sources) == 2
    trainer.output_dir = "pvc://shared/run"
    with pytest.raises(ValueError, match=r"from reprieve\.kubeflow import TrainerClient"):
        inspect.getsource(trainer.func)


def test_a_local_folder_is_the_one_of_where_the_trainer_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK's LocalProcess changes the current folder while a job runs."""
    monkeypatch.chdir(tmp_path)
    trainer = TransformersTrainer(func=train_func, output_dir="checkpoints")
    monkeypatch.chdir("/")
    assert local_trainer(trainer).output_dir == f"{tmp_path}/checkpoints"


def test_a_local_folder_may_be_below_the_users_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    trainer = local_trainer(TransformersTrainer(func=train_func, output_dir="~/checkpoints"))
    assert trainer.request().submitted.output_dir == "/home/somebody/checkpoints"
    assert trainer.environment()["CHECKPOINT_URI"] == "/home/somebody/checkpoints"


def test_a_job_of_another_client_carries_its_settings_itself() -> None:
    trainer = TransformersTrainer(func=train_func, output_dir="/x", data_connection_name="keys", kill_wait=2)
    assert trainer.request().environment == {}
    env = {"CHECKPOINT_INTERVAL": "1h"}
    add_environment(env, trainer.request(starts_launcher=False))
    assert (env["CHECKPOINT_INTERVAL"], env["CHECKPOINT_URI"], env["REPRIEVE_KILL_WAIT"]) == ("1h", "/x", "2")
    assert "REPRIEVE_CREDENTIALS_DIR" not in env
    off = TransformersTrainer(func=train_func, enable_progression_tracking=False).request(starts_launcher=False)
    assert off.environment == {"REPRIEVE_METRICS_PORT": "off"}


@pytest.mark.parametrize(
    ("options", "limit", "kept"),
    [
        ({}, 10, 10),
        ({}, None, 3),
        ({"periodic_checkpoint_config": PeriodicCheckpointConfig(save_total_limit=None)}, 10, 10),
        ({"periodic_checkpoint_config": PeriodicCheckpointConfig(save_total_limit=None)}, None, 3),
        ({"periodic_checkpoint_config": PeriodicCheckpointConfig(save_total_limit=2)}, 10, 2),
        ({"env": {"CHECKPOINT_MAX_RETAIN": "5"}}, 10, 5),
    ],
)
def test_the_scripts_limit_counts_unless_the_submitter_sets_one(
    options: dict[str, Any], limit: int | None, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pod, where the environment has a limit in any case."""
    from transformers import TrainingArguments

    from reprieve.adapters.transformers.preflight import resolve_settings

    trainer = TransformersTrainer(func=train_func, output_dir="/x", **options)
    env = {**trainer.environment(), **(trainer.env or {})}
    add_environment(env, trainer.request())
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    args = TrainingArguments(output_dir="/x", use_cpu=True, save_total_limit=limit)
    settings, _ = resolve_settings(SimpleNamespace(args=args), {}, 1)
    assert settings.keep == kept


def test_a_request_survives_packing() -> None:
    request = TransformersTrainer(func=train_func, output_dir="/x", packages_to_install=["a", "b"]).request(run="r")
    content = {**dataclasses.asdict(request), "added_later": 1}
    assert StartRequest.from_json(content).submitted == request.submitted
    with pytest.raises(ValueError, match="newer Reprieve"):
        StartRequest.from_json({**content, "version": 2})
