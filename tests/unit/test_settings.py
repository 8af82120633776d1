"""Settings: an argument overrides the environment, which overrides the default."""

from __future__ import annotations

from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from reprieve.cli import execute
from reprieve.errors import ConfigError
from reprieve.settings import ALL, AUTO, NEVER, OFF, SETTINGS, option_of, resolve

MINUTE = timedelta(minutes=1)
DOCS = Path(__file__).parents[2] / "docs/launch.md"

EVERY_SETTING = [
    # name, variable, (argument, what it means), (variable's text, what it means), default
    ("checkpoints", "CHECKPOINT_URI", ("/a", "/a"), ("/b", "/b"), None),
    ("fallback", "CHECKPOINT_FALLBACK_URI", ("/a", "/a"), ("/b", "/b"), None),
    ("every", "CHECKPOINT_INTERVAL", ("auto", "auto"), ("20m", "20m"), "10m"),
    ("keep", "CHECKPOINT_MAX_RETAIN", ("all", ALL), ("5", 5), 3),
    ("fresh", "CHECKPOINT_RESUME", (True, True), ("true", False), False),
    ("save_at_end", "REPRIEVE_SAVE_AT_END", (False, False), ("no", False), True),
    ("grace_period", "REPRIEVE_GRACE", ("2m", 2 * MINUTE), ("60", MINUTE), None),
    ("kill_wait", "REPRIEVE_KILL_WAIT", ("0", timedelta(0)), ("60s", MINUTE), timedelta(0)),
    ("take_over", "REPRIEVE_TAKE_OVER", ("90s", 1.5 * MINUTE), ("0", timedelta(0)), None),
    ("name", "REPRIEVE_RUN", ("mine", "mine"), ("theirs", "theirs"), None),
    ("max_restarts", "REPRIEVE_RESTARTS", ("3", 3), ("0", 0), 0),
    ("hang_timeout", "REPRIEVE_HANG", ("1h30m", 90 * MINUTE), ("2.5", timedelta(seconds=2.5)), None),
    ("progress_file", "TRAINING_PROGRESS_FILE", ("a.json", "a.json"), ("/b.json", "/b.json"), None),
    ("progress_every", "PROGRESS_UPDATE_FREQUENCY", ("1", 1), ("5", 5), 10),
    ("metrics_port", "REPRIEVE_METRICS_PORT", ("0", 0), (" OFF ", OFF), AUTO),
    ("drill", "REPRIEVE_DRILL", ("/a", "/a"), ("/b", "/b"), None),
]
ALL_GIVEN = {
    "checkpoints": "/data/run 1",
    "fallback": "/data/run 2",
    "every": "epoch",
    "keep": "all",
    "fresh": True,
    "grace_period": "1m30s",
    "kill_wait": "0",
    "take_over": "2m",
    "name": "mine",
    "max_restarts": "4",
    "hang_timeout": "10m",
    "progress_file": "/data/p.json",
    "progress_every": "7",
    "metrics_port": "9100",
    "save_at_end": False,
    "drill": "/scratch",
}


def test_the_table_has_every_setting() -> None:
    assert {(row[0], row[1]) for row in EVERY_SETTING} == {(name, setting.env) for name, setting in SETTINGS.items()}
    assert set(ALL_GIVEN) == set(SETTINGS)


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {"drill"}))
def test_the_table_in_the_docs_is_the_declaration(name: str) -> None:
    """docs/launch.md: option, variable and default as declared, and a description that starts with the help text."""
    setting = SETTINGS[name]
    value = f" {setting.metavar}" if setting.metavar else ""
    option = f"`{option_of(name)}{value}`" if setting.is_option else ""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in DOCS.read_text(encoding="utf-8").splitlines()
        if line.startswith("|") and f"`{setting.env}" in line
    ]
    [(documented_option, _, default, text)] = rows
    assert (documented_option, default) == (option, setting.default_text)
    assert text.startswith(setting.help)


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.is_option])
def test_every_option_has_a_real_metavar(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        execute(["run", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    metavar = SETTINGS[name].metavar
    assert f"{option_of(name)} {metavar} " in shown if metavar else f"[{option_of(name)}]" in shown


def test_options_of_the_command_line_can_be_given_again() -> None:
    """As for a detached run: the same options, whatever the environment says."""
    given = {name: value for name, value in ALL_GIVEN.items() if SETTINGS[name].is_option}
    settings = resolve(given, {"REPRIEVE_KILL_WAIT": "5s", "REPRIEVE_SAVE_AT_END": "no"})
    assert set(settings.options()) == set(given) - {"fresh"}
    again = resolve({**settings.options(), "fresh": True}, {})
    assert {name: getattr(again, name) for name in given} == {name: getattr(settings, name) for name in given}


@pytest.mark.parametrize(("name", "variable", "argument", "environment", "default"), EVERY_SETTING)
def test_argument_then_environment_then_default(
    name: str, variable: str, argument: tuple[Any, Any], environment: tuple[str, Any], default: Any
) -> None:
    option = f"--{name.replace('_', '-')}"
    for given, env, value, source in [
        ({name: argument[0]}, {variable: environment[0]}, argument[1], option),
        ({name: None}, {variable: environment[0]}, environment[1], variable),
        ({name: None}, {variable: "  "}, default, "default"),
        ({}, {}, default, "default"),
    ]:
        settings = resolve(given, env)
        assert (getattr(settings, name), settings.sources[name]) == (value, source)


def test_an_argument_that_is_no_text_is_taken_as_it_is() -> None:
    settings = resolve({"keep": 7, "grace_period": MINUTE, "every": 500}, {}, options=False)
    assert (settings.keep, settings.grace_period, settings.every) == (7, MINUTE, 500)
    assert settings.sources["keep"] == "keep="


@pytest.mark.parametrize(("text", "fresh"), [("true", False), ("1", False), ("ON", False), ("no", True), ("0", True)])
def test_resume_is_the_opposite_of_fresh(text: str, fresh: bool) -> None:
    assert resolve({}, {"CHECKPOINT_RESUME": text}).fresh is fresh


@pytest.mark.parametrize(
    ("strategy", "interval", "every"),
    [
        ("", "500", "500"),
        ("", "10m", "10m"),
        ("", "auto", "auto"),
        ("steps", "200", "200"),
        ("steps", "200 steps", "200 steps"),
        ("steps", "never", "never"),
        ("steps", "", "500"),
        ("epoch", "", "epoch"),
        ("epoch", "3", "epoch"),
        ("EPOCH ", "", "epoch"),
        ("time", "300", "300s"),
        ("time", "5m", "5m"),
        ("time", "", "10m"),
        ("", "", "10m"),
    ],
)
def test_a_bare_number_counts_what_the_strategy_says(strategy: str, interval: str, every: str) -> None:
    assert resolve({}, {"CHECKPOINT_STRATEGY": strategy, "CHECKPOINT_INTERVAL": interval}).every == every


@pytest.mark.parametrize("interval", ["5m", "1h30m", "30s", "epoch", "auto"])
def test_a_strategy_of_steps_needs_a_number_of_steps(interval: str) -> None:
    with pytest.raises(ConfigError, match=rf"^CHECKPOINT_INTERVAL: '{interval}' .* CHECKPOINT_STRATEGY=steps .*=500"):
        resolve({}, {"CHECKPOINT_STRATEGY": "steps", "CHECKPOINT_INTERVAL": interval})


def test_the_strategy_means_nothing_to_an_argument() -> None:
    assert resolve({"every": "500"}, {"CHECKPOINT_STRATEGY": "epoch"}).every == "500"


@pytest.mark.parametrize("text", ["false", "0", "Off", " no "])
def test_checkpoints_that_are_not_enabled_are_never_written(text: str) -> None:
    env = {"CHECKPOINT_ENABLED": text, "CHECKPOINT_INTERVAL": "500"}
    settings = resolve({}, env)
    assert (settings.every, settings.sources["every"]) == (NEVER, "CHECKPOINT_ENABLED")
    assert resolve({"every": "5m"}, env).every == "5m", "an argument wins"


@pytest.mark.parametrize("text", ["true", "1", "", "  "])
def test_checkpoints_that_are_enabled_are_written_as_the_interval_says(text: str) -> None:
    assert resolve({}, {"CHECKPOINT_ENABLED": text, "CHECKPOINT_INTERVAL": "500"}).every == "500"


BAD = [
    ("keep", "0"),
    ("keep", "-1"),
    ("keep", "many"),
    ("grace_period", "soon"),
    ("grace_period", "0"),
    ("grace_period", "-5s"),
    ("kill_wait", "5 parsecs"),
    ("max_restarts", "-1"),
    ("max_restarts", "often"),
    ("max_restarts", "²"),
    ("hang_timeout", "never"),
    ("hang_timeout", "²"),
    ("progress_every", "0"),
    ("progress_every", "often"),
    ("metrics_port", "65536"),
    ("metrics_port", "-1"),
    ("metrics_port", "http"),
    ("metrics_port", "²"),
]


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_bad_value_names_the_argument_or_the_variable(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')}: "):
        resolve({name: text}, {})
    with pytest.raises(ConfigError, match=f"^{name}=: "):
        resolve({name: text}, {}, options=False)
    with pytest.raises(ConfigError, match=f"^{SETTINGS[name].env}: "):
        resolve({}, {SETTINGS[name].env: text})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("CHECKPOINT_RESUME", "perhaps"),
        ("CHECKPOINT_ENABLED", "maybe"),
        ("CHECKPOINT_STRATEGY", "sometimes"),
        ("CHECKPOINT_SAVE_TYPE", "half"),
    ],
)
def test_a_bad_variable_without_an_argument_is_named(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        resolve({}, {variable: text})


# What is passed on to what the launcher starts


def test_nothing_that_was_not_said_is_passed_on() -> None:
    assert resolve({}, {}).environment() == {}
    assert resolve({}, {"PATH": "/bin", "CHECKPOINT_INTERVAL": " "}).environment() == {}
    assert resolve({"keep": "2"}, {"REPRIEVE_GRACE": "30"}).environment() == {
        "CHECKPOINT_MAX_RETAIN": "2",
        "REPRIEVE_GRACE": "30s",
    }


def test_all_that_was_said_is_understood_alike_by_the_child() -> None:
    before = resolve(ALL_GIVEN, {})
    after = resolve({}, before.environment())
    assert {name: getattr(after, name) for name in SETTINGS} == {name: getattr(before, name) for name in SETTINGS}
    assert after.sources == {name: setting.env for name, setting in SETTINGS.items()}


@pytest.mark.parametrize(
    ("strategy", "interval"),
    [
        *product(["", "epoch", "time"], ["500", "epoch", "300", "5m", ""]),
        *product(["steps"], ["500", "500 steps", "never", ""]),
    ],
)
def test_an_interval_is_understood_alike_beside_the_strategy(strategy: str, interval: str) -> None:
    env = {"CHECKPOINT_STRATEGY": strategy, "CHECKPOINT_INTERVAL": interval}
    settings = resolve({}, env)
    assert resolve({}, {**env, **settings.environment()}).every == settings.every


@pytest.mark.parametrize("text", ["1ms", "2.5s", "90s", "1h30m", "12h", "14d", "123456.5s"])
@pytest.mark.parametrize("name", ["grace_period", "kill_wait", "hang_timeout"])
def test_a_duration_is_passed_on_exactly(name: str, text: str) -> None:
    settings = resolve({name: text}, {})
    assert getattr(resolve({}, settings.environment()), name) == getattr(settings, name)


@pytest.mark.parametrize("given", [{}, {"every": "5m"}])
def test_what_the_launcher_decided_holds_in_an_environment_that_disables(given: dict[str, str]) -> None:
    env = {"CHECKPOINT_ENABLED": "false"}
    settings = resolve(given, env)
    assert resolve({}, {**env, **settings.environment()}).every == settings.every


@pytest.mark.parametrize(("given", "seconds"), [(3.0, 3), (0, 0), (timedelta(0), 0), (2 * MINUTE, 120), ("4", 4)])
def test_a_duration_may_be_a_number(given: object, seconds: float) -> None:
    assert resolve({"kill_wait": given}, {}).kill_wait == timedelta(seconds=seconds)


def test_a_number_that_is_no_duration() -> None:
    with pytest.raises(ConfigError, match="--kill-wait"):
        resolve({"kill_wait": -1.0}, {})


@pytest.mark.parametrize(
    ("kind", "rank", "warnings"), [("full", "0", 0), ("Incremental", "0", 1), ("incremental", "1", 0)]
)
def test_incremental_checkpoints_are_whole_which_is_said_once(
    caplog: pytest.LogCaptureFixture, kind: str, rank: str, warnings: int
) -> None:
    env = {"CHECKPOINT_SAVE_TYPE": kind, "RANK": rank}
    resolve({}, {"CHECKPOINT_SAVE_TYPE": kind})  # the launcher
    resolve({}, env, options=False)
    assert caplog.text.count("is saved whole") == warnings


# Starting over


@pytest.mark.parametrize(
    ("given", "env", "request_id"),
    [
        ({}, {}, None),
        ({}, {"CHECKPOINT_RESUME": "true", "REPRIEVE_RUN": "uid"}, None),
        ({"fresh": True}, {"REPRIEVE_RUN": "uid"}, ""),
        ({}, {"CHECKPOINT_RESUME": "false"}, ""),
        ({}, {"CHECKPOINT_RESUME": "false", "REPRIEVE_RUN": "uid"}, "uid"),
        ({"name": "mine"}, {"CHECKPOINT_RESUME": "false", "REPRIEVE_RUN": "uid"}, "mine"),
        ({}, {"CHECKPOINT_RESUME": "false", "REPRIEVE_RUN": "uid", "REPRIEVE_START_OVER": "launch"}, "launch"),
    ],
)
def test_a_request_to_start_over_by_the_environment_has_an_id(
    given: dict[str, object], env: dict[str, str], request_id: str | None
) -> None:
    """A request with an id is carried out once; a script that says so itself starts over every time."""
    assert resolve(given, env, options=False).start_over(env) == request_id


def test_starting_over_in_a_pod_needs_the_name_of_the_run() -> None:
    """Each pod of the job would start over otherwise, and move the checkpoints of the one before away."""
    env = {"CHECKPOINT_RESUME": "false", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    with pytest.raises(ConfigError, match=r"CHECKPOINT_RESUME=false without REPRIEVE_RUN: .*jobset-uid"):
        resolve({}, env, options=False).start_over(env)
    for known in ({"REPRIEVE_RUN": "uid"}, {"REPRIEVE_START_OVER": "fit"}, {"REPRIEVE_DRILL": "/tmp/drill"}):
        assert resolve({}, env | known, options=False).start_over(env | known) is not None
    assert resolve({"fresh": True}, env, options=False).start_over(env) == "", "the script says so"


def test_a_folder_takes_the_place_of_an_object_store(caplog: pytest.LogCaptureFixture) -> None:
    env = {"CHECKPOINT_URI": "s3://bucket/run", "CHECKPOINT_FALLBACK_URI": "/mnt/run"}
    found = resolve({}, env)
    assert (found.checkpoints, found.sources["checkpoints"]) == ("/mnt/run", "CHECKPOINT_FALLBACK_URI")
    assert "this version does not write to s3://bucket/run: checkpoints go to /mnt/run" in caplog.text
    assert found.environment()["CHECKPOINT_URI"] == "/mnt/run", "the ranks save where the launcher says"


@pytest.mark.parametrize("uri", ["/mnt/run", "file:///mnt/run", "runs/a"])
def test_a_folder_needs_no_other(uri: str) -> None:
    assert resolve({}, {"CHECKPOINT_URI": uri, "CHECKPOINT_FALLBACK_URI": "/other"}).checkpoints == uri


def test_a_folder_of_the_script_that_is_not_the_one_of_the_job_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    env = {"CHECKPOINT_URI": "/workspace/run/"}
    assert resolve({"checkpoints": "out"}, env, options=False).checkpoints == "out"
    assert "checkpoints go to out, as the script says, and not to CHECKPOINT_URI=/workspace/run/" in caplog.text
    caplog.clear()
    resolve({"checkpoints": "/workspace/run"}, env, options=False)
    resolve({"checkpoints": "out"}, env, options=True)
    assert caplog.text == ""
