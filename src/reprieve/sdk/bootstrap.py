"""The first program of a pod: it installs what the image lacks, and starts `reprieve run` in this process.

Its text travels in the command of the TrainJob (`command.py`) and runs on the Python of the image, where Reprieve may
be missing: it imports the standard library only. The process stays the same, because Linux drops signals that PID 1
does not handle yet, and a new program would begin without handlers.
"""

import base64
import importlib
import importlib.util
import json
import os
import signal
import site
import subprocess
import sys
import tempfile
import zlib

STOPPED = 143


def stop(number: int, frame: object) -> None:
    """SIGTERM before there is anything to save. `install` ends pip on the way out."""
    sys.exit(STOPPED)


def install(packages: "list[str]", index_urls: "list[str]") -> None:
    """Install packages, beside those that are there. pip itself chooses the user's folder where it must."""
    move_user_folder()
    urls = ["--index-url" if number == 0 else "--extra-index-url" for number in range(len(index_urls))]
    options = [word for pair in zip(urls, index_urls) for word in pair]  # noqa: B905 - Python 3.9
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-warn-script-location", *options, *packages]
    print(f"[Kubeflow] installing {' '.join(packages)}", flush=True)
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    pip = subprocess.Popen(command, env=env, start_new_session=True)  # noqa: S603 - pip
    try:
        code = pip.wait()
    finally:
        if pip.returncode is None:
            os.killpg(pip.pid, signal.SIGKILL)
    if code:
        sys.exit(f"[Kubeflow] pip could not install {' '.join(packages)}: exit code {code}")
    importlib.invalidate_caches()
    if site.ENABLE_USER_SITE and site.getusersitepackages() not in sys.path:
        site.addsitedir(site.getusersitepackages())  # pip has just created it


def move_user_folder() -> None:
    """Give pip, and the Pythons that this process starts, a folder for packages where the user's cannot be written.

    OpenShift runs containers as a user of its own choice, whose home is often `/`.
    """
    folder = site.getusersitepackages()
    while not os.path.exists(folder):  # noqa: PTH110 - Path.exists raises below a folder that may not be entered
        folder = os.path.dirname(folder)  # noqa: PTH120
    if os.access(folder, os.W_OK):
        return
    os.environ["PYTHONUSERBASE"] = tempfile.mkdtemp(prefix="reprieve-packages-")
    os.environ.pop("PYTHONNOUSERSITE", None)
    site.USER_BASE = site.USER_SITE = None  # what `site` has read at the start of Python
    site.ENABLE_USER_SITE = site.ENABLE_USER_SITE or sys.prefix == sys.base_prefix


def has_reprieve() -> bool:
    try:
        return importlib.util.find_spec("reprieve.sdk.pod") is not None
    except ImportError:
        return False


def main(packed: str) -> None:
    signal.signal(signal.SIGTERM, stop)
    request = json.loads(zlib.decompress(base64.b64decode(packed)))
    packages = [*request["packages"], *([] if has_reprieve() else [request["reprieve"]])]
    if packages:
        install(packages, request["index_urls"])
    from reprieve.sdk.pod import start

    start(request)


if __name__ == "__main__":
    main(sys.argv[1])
