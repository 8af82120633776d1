"""The way of a function into a pod: no character of it changes, and a stop at any time is one."""

from __future__ import annotations

import base64
import builtins
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import zlib
from pathlib import Path
from random import Random
from typing import Any

import pytest

from reprieve.kubeflow import TransformersTrainer
from reprieve.kubernetes.command import hides_launcher, starts_launcher
from reprieve.launch.process import start_time
from reprieve.sdk.command import command_of, function_source
from reprieve.sdk.pod import script_of
from reprieve.sdk.request import StartRequest
from tests.support.generated_functions import imported, nasty_function
from tests.support.launch_kit import until
from tests.support.wheels import make_wheel

ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "REPRIEVE_METRICS_PORT": "off"}


@pytest.mark.parametrize("seed", range(0, 200, 50))
def test_every_function_arrives_byte_for_byte(tmp_path: Path, seed: int) -> None:
    for number in range(seed, seed + 50):
        arrives(nasty_function(Random(number)), tmp_path)


def arrives(text: str, tmp_path: Path) -> None:
    function = imported(text, tmp_path)
    packed = command_of(TransformersTrainer(func=function).request())[-1]
    content = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert content["source"] == text
    script = script_of(StartRequest.from_json(content))
    assert text in script
    found: dict[str, Any] = {"__name__": "somewhere"}
    exec(compile(script.encode(), "script", "exec"), found)
    assert found["train_func"]() == function()


def run(command: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    env = {**ENV, "REPRIEVE_STATE_DIR": str(tmp_path)}
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)


TRICKY = textwrap.dedent(
    '''\
    def train_func(a):
        """$HOME `date` \\\\ "quoted" 'single' EOF"""
        def nested(x):
            return f"{x} $PATH `id` \\\\n é 🚆"
        print(nested(a))
        print(train_func.__doc__)
    '''
)
PRINTED = '$5 `a` \\ "b" $PATH `id` \\n é 🚆\n$HOME `date` \\ "quoted" \'single\' EOF\n'
ARGUMENTS = {"a": '$5 `a` \\ "b"'}


def test_a_function_runs_as_the_command_of_a_container(tmp_path: Path) -> None:
    trainer = TransformersTrainer(func=imported(TRICKY, tmp_path), func_args=ARGUMENTS)
    done = run(command_of(trainer.request()), tmp_path)
    assert (done.returncode, done.stdout) == (0, PRINTED), done.stderr
    assert "reprieve: finished" in done.stderr


def test_a_function_runs_through_the_shell_of_the_sdks_own_client(tmp_path: Path) -> None:
    trainer = TransformersTrainer(func=imported(TRICKY, tmp_path), func_args=ARGUMENTS)
    source = function_source(trainer.request(starts_launcher=False, installs=False))
    script = f"cat > f.py <<EOF\n{source}\ntrain_func(**{{'ignored': 1}})\nEOF\npython f.py"
    done = run(["bash", "-c", script], tmp_path)
    assert (done.returncode, done.stdout) == (0, PRINTED), done.stderr


OUTSIDE = """
import os
LIMIT = 5

def logged(function):
    return function

@logged
def train_func(a=LIMIT):
    global seen
    seen = [each for each in range(a)]
    class Inside:
        first = 1
        second = first
    def nested():
        return os.getcwd(), seen, __name__, Inside, train_func
    return nested()
"""


def test_names_that_a_pod_does_not_have_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    TransformersTrainer(func=imported(OUTSIDE, tmp_path))
    assert "func=train_func uses names that are defined outside of it" in caplog.text
    assert "do not have: LIMIT, logged, os. Import them in the function" in caplog.text
    caplog.clear()
    TransformersTrainer(func=imported(TRICKY, tmp_path), func_args=ARGUMENTS)
    assert not caplog.records


OF_A_CELL = """
def train_func():
    get_ipython().system('nvidia-smi')
    display(1)
"""


def test_what_only_a_notebook_runs_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPython turns `!nvidia-smi` into this call, and has both names beside those of Python."""
    for name in ("get_ipython", "display"):
        monkeypatch.setattr(builtins, name, print, raising=False)
    TransformersTrainer(func=imported(OF_A_CELL, tmp_path))
    assert (
        "do not have: display, get_ipython (a ! or % command of a notebook: call subprocess.run). Import" in caplog.text
    )


def test_annotations_that_are_not_evaluated_here_are_not_in_the_pod(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "from __future__ import annotations\n\n\ndef train_func(a: Config = 1) -> Config:\n    print(a)\n"
    done = run(command_of(TransformersTrainer(func=imported(text, tmp_path)).request()), tmp_path)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert not caplog.records


def test_the_exit_code_of_the_function_is_that_of_the_container(tmp_path: Path) -> None:
    text = "def train_func():\n    import sys\n    sys.exit(7)\n"
    assert run(command_of(TransformersTrainer(func=imported(text, tmp_path)).request()), tmp_path).returncode == 7


def test_admission_finds_the_launcher_in_the_command(tmp_path: Path) -> None:
    command = command_of(TransformersTrainer(func=imported(TRICKY, tmp_path), func_args=ARGUMENTS).request())
    assert starts_launcher(command) and not hides_launcher(command)
    assert max(len(word) for word in command) < 128 * 1024


def request_that_installs(package: str) -> str:
    return StartRequest(name="f", source="def f():\n    print('trained')\n", packages=(package,)).pack()


def start(package: str, tmp_path: Path) -> subprocess.Popen[bytes]:
    spec = importlib.util.find_spec("reprieve.sdk.bootstrap")
    assert spec is not None and spec.origin is not None
    program = [sys.executable, "-c", Path(spec.origin).read_text(), request_that_installs(package)]
    env = {**ENV, "REPRIEVE_STATE_DIR": str(tmp_path)}
    return subprocess.Popen(program, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


ENDLESS = """
import os, pathlib, time
pathlib.Path("../builds.new").write_text(str(os.getpid()))
pathlib.Path("../builds.new").rename("../builds")
time.sleep(600)
"""


def test_a_stop_while_packages_are_installed_ends_with_143(tmp_path: Path) -> None:
    """The package is a folder whose build never ends. It needs nothing, so pip asks no index."""
    project = tmp_path / "endless"
    project.mkdir()
    build = '[build-system]\nrequires = []\nbuild-backend = "endless"\nbackend-path = ["."]\n'
    (project / "pyproject.toml").write_text(build)
    (project / "endless.py").write_text(ENDLESS)
    process = start(str(project), tmp_path)
    until(lambda: process.poll() is not None or (tmp_path / "builds").exists(), limit_s=60)
    builds = int((tmp_path / "builds").read_text())
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, b"trained" in output) == (143, False)
    assert time.monotonic() - began < 2
    until(lambda: start_time(builds) is None, limit_s=20)


PIP = """
import json, pathlib, sys
folder = pathlib.Path(__file__).parent.parent
(folder / "reprieve/sdk").mkdir(parents=True)
(folder / "reprieve/sdk/pod.py").write_text("def start(request): print('started', request['name'])")
(folder / "arguments.json").write_text(json.dumps(sys.argv[1:]))
"""


def test_a_reprieve_that_the_image_lacks_is_installed_first(tmp_path: Path) -> None:
    """The image is this Python without its packages, and pip is a module that installs a stand-in."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").touch()
    (tmp_path / "pip/__main__.py").write_text(PIP)
    urls = ["https://a.example", "https://b.example", "https://c.example"]
    trainer = TransformersTrainer(
        func=imported(TRICKY, tmp_path),
        func_args=ARGUMENTS,
        packages_to_install=["peft>=0.1"],
        pip_index_urls=urls,
        reprieve="/wheels/reprieve.whl",
    )
    *_, program, packed = command_of(trainer.request())
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-S", "-c", program, packed]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "[Kubeflow] installing peft>=0.1 /wheels/reprieve.whl\nstarted train_func\n", done.stderr
    assert json.loads((tmp_path / "arguments.json").read_text())[3:] == [
        "--index-url", urls[0], "--extra-index-url", urls[1], "--extra-index-url", urls[2],
        "peft>=0.1", "/wheels/reprieve.whl",
    ]  # fmt: skip


def test_a_package_that_cannot_be_installed_ends_the_job(tmp_path: Path) -> None:
    process = start(str(tmp_path / "absent"), tmp_path)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"could not install" in errors and b"trained" not in output


STAND_IN = """
import os, subprocess, sys
def start(request):
    subprocess.run([sys.executable, "-c", "import reprieve.sdk.pod as found; print(found.__file__)"], check=True)
"""
RANDOM_USER = 1_000_730_000
"""OpenShift gives each project a range of such numbers, and no user of the image has one of them."""


def python_of_everybody() -> str | None:
    """A Python that another user can run, outside of an environment of its own, and with pip: as in an image."""
    if os.getuid() == 0:
        for python in ("/usr/bin/python3", "/usr/local/bin/python3"):
            if (
                Path(python).exists()
                and subprocess.run([python, "-m", "pip", "-V"], capture_output=True).returncode == 0
            ):
                return python
    return None


@pytest.mark.parametrize("environment", [{"HOME": "/"}, {"HOME": "/root", "PYTHONNOUSERSITE": "1"}], ids=str)
def test_a_user_without_a_home_gets_packages_and_so_do_the_ranks(
    environment: dict[str, str],
) -> None:
    """The user can write neither to the folders of the image nor to its home."""
    python = python_of_everybody()
    if python is None:
        pytest.skip("needs root, and a Python with pip that other users can run")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        wheel = make_wheel(Path(folder), "reprieve", {"reprieve/sdk/pod.py": STAND_IN})
        *_, program, packed = command_of(TransformersTrainer(func=train_func, reprieve=str(wheel)).request())
        env = {"PATH": "/usr/bin:/bin", "TMPDIR": folder, "PIP_NO_INDEX": "1", **environment}
        user: dict[str, Any] = {"user": RANDOM_USER, "group": 0, "extra_groups": []}
        command = [python, "-c", program, packed]
        done = subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, check=False, timeout=60, **user
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith(f"{folder}/reprieve-packages-"), done.stdout


def train_func() -> None: ...
