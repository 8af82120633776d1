"""Which commands start the launcher by themselves."""

from __future__ import annotations

import pytest

from reprieve.kubernetes.command import BECOMES_LAUNCHER, LAUNCHER, hides_launcher, starts_launcher

SCRIPT = "pip install -r requirements.txt\n"


@pytest.mark.parametrize(
    "command",
    [
        ["reprieve", "run", "torchrun", "train.py"],
        ["/opt/venv/bin/reprieve", "run", "--", "python", "train.py"],
        ["python", "-m", "reprieve", "run", "python", "train.py"],
        ["/usr/bin/python3.11", "-m", "reprieve", "run", "x"],
        ["reprieve", "hold"],
        ["bash", "-c", SCRIPT + "exec reprieve run torchrun train.py"],
        ["/bin/sh", "-ec", "exec python -m reprieve run python train.py"],
        ["env", "A=b", "reprieve", "run", "x"],
        ["tini", "--", "reprieve", "run", "x"],
        ["/usr/bin/dumb-init", "-r", "15:2", "reprieve", "run", "x"],
        ["uv", "run", "reprieve", "run", "x"],
        ["uv", "--offline", "run", "--no-sync", "--python", "3.12", "reprieve", "run", "x"],
        ["uv", "run", "-m", "reprieve", "run", "x"],
        ["tini", "-g", "-e", "143", "--", "env", "-i", "-u", "X", "A=b c", "python", "-u", "-m", "reprieve", "run"],
        ["env", "-i", "bash", "-c", "cd x && exec reprieve run x"],
        ["bash", "-c", "if true; then\n  A=1 B='x y' exec uv run reprieve run x\nfi"],
        ["bash", "-c", 'exec "$VENV/bin/reprieve" run x'],
        ["bash", "-c", "exec \\\n  reprieve run x"],
        ["bash", "-c", "pip install git+https://a#egg=b; exec reprieve run x"],
        ["bash", "-c", "cat <<'EOF' > t.py\n# it's\nEOF\nexec reprieve run t.py"],
        ["bash", "-c", "cat <<A <<B\nx\nA\n'\nB\nexec reprieve run x"],
        ["sh", "-c", f"{BECOMES_LAUNCHER}\nexec python -c x"],
    ],
)
def test_never_twice(command: list[str]) -> None:
    assert starts_launcher(command)
    assert not hides_launcher(command)


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "train.py"],
        ["python", "reprieve"],
        ["python", "-m", "reprieve.other", "run"],
        ["reprieve"],
        ["reprieve", "ls", "run"],
        ["bash", "-c", SCRIPT + "torchrun train.py"],
        ["bash", "-c", "echo not-reprieve run"],
        ["bash", "-c", "# use reprieve run\ntorchrun train.py"],
        ["bash", "-c", "torchrun train.py # exec reprieve run"],
        ["bash", "-c", "echo reprieve run\ntorchrun train.py"],
        ["bash", "-c", "echo 'now; exec reprieve run x' \"; reprieve run\"\ntorchrun train.py"],
        ["bash", "-c", "cat <<EOF\nreprieve run x\nEOF\ntorchrun train.py"],
        ["bash", "-c", "cat <<EOF\nreprieve run"],
        ["bash", "-c", f"torchrun train.py\n{BECOMES_LAUNCHER}"],
        ["env", "A=b", "torchrun", "train.py"],
        ["uv", "run", "train.py", "reprieve", "run"],
        ["python", "-u", "train.py"],
        ["python", "-c", "import reprieve", "run"],
        ["tini", "--"],
        [],
        ["./train.sh"],
    ],
)
def test_all_others_get_one(command: list[str]) -> None:
    assert not starts_launcher(command)
    assert starts_launcher([*LAUNCHER, *command])


def test_a_shell_that_waits_for_the_launcher_does_not_forward_signals() -> None:
    assert hides_launcher(["bash", "-c", SCRIPT + "reprieve run torchrun train.py"])
    assert hides_launcher(["tini", "--", "bash", "-c", "exec > log\nreprieve run torchrun train.py"])
    assert hides_launcher(["bash", "-c", "# exec reprieve run\nreprieve run torchrun train.py"])
