"""Callbacks and pushes that read a checkpoint as soon as it is saved, and a local Hub to push to."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Callable
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import transformers

from reprieve.checkpoint.buffers.block_pool import BlockPool
from reprieve.checkpoint.folder.verify import verify
from reprieve.transformers import protect
from tests.support.jobs.hf_jobs import HfJob, make


class Looking(transformers.TrainerCallback):
    """A user's callback that reads the checkpoint in `on_save` and records what it found in `looked.jsonl`."""

    def __init__(self, folder: str, raising: int | None = None) -> None:
        self._notes = Path(folder) / "looked.jsonl"
        self._raising = raising

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        verify(path, BlockPool(limit=2))
        saved = json.loads((path / "trainer_state.json").read_text())
        found = {
            "path": str(path),
            "step": saved["global_step"],
            "best": saved["best_model_checkpoint"],
            "trainers_best": state.best_model_checkpoint,
            "best_is_there": Path(state.best_model_checkpoint or "nowhere").is_dir(),
            "files": digests(path),
        }
        with self._notes.open("a") as file:
            file.write(json.dumps(found) + "\n")
        if state.global_step == self._raising:
            raise LookupError("the callback does not like it")


class Judging(transformers.TrainerCallback):
    """A callback that sets the evaluation loss by step."""

    def __init__(self, losses: dict[int, float]) -> None:
        self._losses = losses

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        metrics["eval_loss"] = self._losses[state.global_step]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def train_and_push(job: HfJob, endpoint: str) -> None:
    """Push during training and at its end."""
    import huggingface_hub

    huggingface_hub.constants.ENDPOINT = endpoint
    huggingface_hub.hf_api.api.endpoint = endpoint  # what older versions of transformers push through
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    transformers.set_seed(3)
    trainer = make(job)
    with open(os.devnull, "w") as trainer.losses:
        protect(trainer, notices="off")
        push = trainer._push_from_checkpoint

        def push_after_the_last(*args: Any, **kwargs: Any) -> None:
            # transformers copies the model into output_dir while it may still upload the one before from there: that
            # upload fails then, and nobody hears of it.
            if getattr(trainer, "push_in_progress", None) is not None:
                trainer.push_in_progress.wait_until_done()
            push(*args, **kwargs)

        trainer._push_from_checkpoint = push_after_the_last
        trainer.train()
        trainer.push_to_hub()


class Hub:
    """As much of the Hub as an upload needs. All files come in the body of its last request."""

    def __init__(self, on_begin: Callable[[list[str]], object] = lambda paths: None) -> None:
        """`on_begin` is called with the paths in the repository, before the first response to an upload."""
        self.begun: list[list[str]] = []
        self.uploads: list[dict[str, bytes]] = []
        """The files of each commit."""
        self._on_begin = on_begin
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer({"sha": "0" * 40, "id": "me/out", "siblings": []})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(hub._post(self.path.split("?")[0], body))

            def _answer(self, found: dict[str, Any]) -> None:
                text = json.dumps(found).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _post(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/repos/create"):
            return {"url": f"{self.url}/me/out", "name": "me/out"}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            self.begun.append(names)
            self._on_begin(names)
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.uploads.append({file["path"]: base64.b64decode(file["content"]) for file in files})
            return {"commitUrl": f"{self.url}/me/out/commit/{'0' * 40}", "commitOid": "0" * 40}
        return {"warnings": [], "errors": []}  # the validation of the model card
