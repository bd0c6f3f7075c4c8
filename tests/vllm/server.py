"""vLLM's real API server, spoken to over HTTP; `cpu_server` is one of the CPU test bed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.vllm.client import (
    BASE_ENVIRONMENT,
    ROOT,
    EngineError,
    EngineOptions,
    free_port,
    vllm_python,
)

START_SECONDS = 900.0
CLOSE_SECONDS = 60.0
PLUGIN = "kvpd_test_backends"
GENERATE = "/inference/v1/generate"


class Server:
    """An API server and its engine.

    Args:
        name: of its log.
        arguments: of ``vllm serve``, without host and port.
        environment: on top of this process's.
        directory: where the log goes.
        python: the interpreter that has vLLM.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        python: str = sys.executable,
    ) -> None:
        self.name = name
        self.arguments = list(arguments)
        self.environment = dict(environment)
        self.port = free_port()
        self.log_path = directory / f"{name}.log"
        self._log = self.log_path.open("wb")
        # What `vllm serve` runs. That command asks for a distribution named vllm, and the CPU build
        # has another name.
        command = [python, "-m", "vllm.entrypoints.openai.api_server", *arguments]
        self._process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | environment,
            cwd=ROOT,
            start_new_session=True,
        )

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EngineError(f"{self.name} ended\n{self.log[-6000:]}")
            try:
                self._get("/health")
                return
            except OSError:
                time.sleep(0.2)
        raise EngineError(f"{self.name} did not come up\n{self.log[-6000:]}")

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Greedy tokens of a prompt of token ids: the server's whole answer."""
        body = {
            "token_ids": list(prompt),
            "sampling_params": {
                "temperature": 0.0,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "detokenize": False,
            },
            "kv_transfer_params": kv_transfer_params,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{GENERATE}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                value: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise EngineError(f"{self.name}: {error}: {text}\n{self.log[-6000:]}") from None
        return value

    def metrics(self) -> dict[str, float]:
        """`/metrics`, by name and those labels that tell samples of one engine apart."""
        found: dict[str, float] = {}
        for line in self._get("/metrics").splitlines():
            if line.startswith(("vllm:kvpd_", "vllm:nixl_")):
                name, value = line.rsplit(" ", 1)
                family, _, labels = name.rstrip("}").partition("{")
                kept = [
                    label.replace('"', "")
                    for label in labels.split(",")
                    if label and not label.startswith(("engine=", "model_name="))
                ]
                found[" ".join([family, *sorted(kept)])] = float(value)
        return found

    def metrics_with(self, name: str, value: float) -> dict[str, float]:
        """`/metrics` once one of them has a value: an answer may overtake what is counted of it.

        After a minute, whatever is there: the caller's comparison then says what is missing.
        """
        deadline = time.monotonic() + 60.0
        while (found := self.metrics()).get(name) != value and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def close(self) -> None:
        """Ask it to end, and its session too where it does not."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._log.close()

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def __enter__(self) -> Self:
        try:
            self.wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def cpu_server(
    name: str, options: EngineOptions, directory: Path, more: Sequence[str] = ()
) -> Server:
    """A server with the options of a test-bed engine, and the backend as a plugin.

    Args:
        more: further arguments of ``vllm serve``.
    """
    environment = BASE_ENVIRONMENT | options.environment
    paths = [str(_plugin(directory)), os.environ.get("PYTHONPATH", ""), str(ROOT)]
    environment |= {
        # A server always runs its engine in a process of its own.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "KVPD_TEST_BACKEND": options.backend,
        # Empty: written, whatever this process was told.
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    arguments = [
        *("--model", str(options.model)),
        *("--dtype", options.dtype),
        "--skip-tokenizer-init",
        "--enforce-eager",
        *("--seed", "0"),
        *("--max-model-len", str(options.max_model_len)),
        *("--block-size", str(options.block_size)),
        *("--num-gpu-blocks-override", str(options.num_blocks)),
        *("--max-num-batched-tokens", str(options.max_num_batched_tokens)),
        *("--max-num-seqs", "8"),
        "--no-enable-prefix-caching",
        # For GENERATE, which takes and gives token ids.
        "--enable-scale-out",
        *more,
    ]
    if options.transfer is not None:
        arguments += ["--kv-transfer-config", json.dumps(options.transfer)]
    return Server(name, arguments, environment, directory, vllm_python())


def _plugin(directory: Path) -> Path:
    """A folder that, on the path, is an installed distribution with the plugin's entry point."""
    folder = directory / "plugin"
    info = folder / f"{PLUGIN}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{PLUGIN} = tests.vllm.plugin:register\n"
    )
    return folder
