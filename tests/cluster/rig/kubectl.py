"""A small client: kubectl in the cluster's network namespace, with JSON in and out.

The rig installs controllers with it, and the tests do everything with it. `Kubectl.for_namespace` gives a client that
is bound to one namespace.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

DEFAULT_TIMEOUT_S = 60
POLL_S = 0.2

Object = dict[str, Any]


class KubectlError(Exception):
    """kubectl ended with an error. The message is what it printed."""


@dataclass(frozen=True)
class Kubectl:
    """Runs kubectl with a prefix that enters the cluster's network namespace."""

    command: list[str]
    namespace: str = ""

    def for_namespace(self, namespace: str) -> Kubectl:
        return replace(self, namespace=namespace)

    def arguments(self, *arguments: str) -> list[str]:
        """The whole command line, for callers that start kubectl themselves."""
        return [*self.command, *(["--namespace", self.namespace] if self.namespace else []), *arguments]

    def run(self, *arguments: str, stdin: str = "", timeout_s: float = DEFAULT_TIMEOUT_S) -> str:
        """Run a kubectl command and return its output."""
        done = subprocess.run(
            self.arguments(*arguments), input=stdin, capture_output=True, text=True, timeout=timeout_s
        )
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def succeeds(self, *arguments: str) -> bool:
        try:
            self.run(*arguments)
        except (KubectlError, subprocess.TimeoutExpired):
            return False
        return True

    def get(self, kind: str, name: str) -> Object:
        found: Object = json.loads(self.run("get", kind, name, "--output", "json"))
        return found

    def find(self, kind: str, name: str) -> Object | None:
        """The object, or None if it does not exist."""
        output = self.run("get", kind, name, "--output", "json", "--ignore-not-found")
        return json.loads(output) if output.strip() else None

    def list(self, kind: str, *, selector: str = "") -> list[Object]:
        options = ["--selector", selector] if selector else []
        found: list[Object] = json.loads(self.run("get", kind, "--output", "json", *options))["items"]
        return found

    def apply(self, *objects: Object) -> None:
        """Create or change objects, with server-side apply."""
        manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.run("apply", "--server-side", "--force-conflicts", "--filename", "-", stdin=manifest)

    def create(self, *objects: Object) -> None:
        manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.run("create", "--filename", "-", stdin=manifest)

    def patch(self, kind: str, name: str, changes: Object, *options: str) -> None:
        """Merge `changes` into an object. A sub-resource is an option: `--subresource=status`."""
        self.run("patch", kind, name, "--type", "merge", "--patch", json.dumps(changes), *options)

    def delete(self, kind: str, name: str, *options: str, wait: bool = True) -> None:
        """Delete an object. Options are kubectl's: `--force`, `--grace-period=0`."""
        self.run("delete", kind, name, "--ignore-not-found", f"--wait={str(wait).lower()}", *options, timeout_s=180)

    def evict(self, pod: str) -> None:
        """Evict a pod through the eviction API, as a drain does."""
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        self.run("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))

    def logs(self, pod: str, *options: str) -> str:
        return self.run("logs", pod, *options)

    def exec(self, pod: str, *command: str, container: str = "") -> str:
        """Run a command in a container and return its output."""
        return self.run("exec", pod, *(["--container", container] if container else []), "--", *command)

    def wait_for(
        self, kind: str, name: str, condition: Callable[[Object], bool], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Object:
        """Wait until an object exists and meets a condition, and return it. An API server that does not answer for a
        moment is no failure."""
        deadline = time.monotonic() + timeout_s
        while True:
            found, error = None, None
            try:
                found = self.find(kind, name)
            except (KubectlError, subprocess.TimeoutExpired) as problem:
                error = problem
            if found is not None and condition(found):
                return found
            if time.monotonic() > deadline:
                if error is not None:
                    raise error
                state = json.dumps((found or {}).get("status"), indent=1)
                raise TimeoutError(f"{kind} {name}: not as expected after {timeout_s:.0f} s; its status is {state}")
            time.sleep(POLL_S)


def has_condition(kind: str, *, status: str = "True") -> Callable[[Object], bool]:
    """A condition for `wait_for`: `has_condition("Complete")`."""

    def check(found: Object) -> bool:
        conditions = found.get("status", {}).get("conditions", [])
        return any(each["type"] == kind and each["status"] == status for each in conditions)

    return check
