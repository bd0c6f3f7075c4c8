"""An engine of the test bed that is timed, on a GPU or, to try the script, on a CPU.

Engines are driven as tests/vllm/engine.py describes. What is replaced, besides the attention
backend: with the switch `convert_on_main_stream`, and only then, kvpd's conversions run on the
stream of the model.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpd.convert import Completion, ConversionQueue
from kvpd.request import Ready
from tests.vllm import engine as bed

SHUFFLED_BACKEND = "tests.gpu.backend.ShuffledTritonBackend"
OF_VLLM = {"standard": "TRITON_ATTN", "flash": "FLASH_ATTN"}


@dataclass
class Load:
    """What the connector does for one request in the engine's thread.

    Attributes:
        began, reported: readings of `time.perf_counter`: entering `start_load_kv`, and after the
            poll that reported the request.
        start_seconds: in that `start_load_kv`.
        poll_seconds, num_polls: in `get_transfer_results` from there on, the last one included.
    """

    began: float
    start_seconds: float
    poll_seconds: float = 0.0
    num_polls: int = 0
    reported: float = float("nan")


class TimedEngine(bed.Engine):
    """Notes when requests are loaded and reported, and when tokens come out."""

    # A wait between two steps would be part of every token's latency.
    busy_wait_seconds = poll_wait_seconds = 0.0
    # As long as vLLM's own loop sleeps after a step that ran no model. Without it a thread that has
    # to answer waits for this one's interpreter, 5 ms each time.
    sleep_seconds = 0.001

    def __init__(self, options: dict[str, Any]) -> None:
        self.device: str = options["switches"]["device"]
        self.loads: dict[str, Load] = {}
        self.ready: dict[str, Ready] = {}
        self.main_stream_submits = 0
        self.converted_at: list[float] = []
        self.freed: dict[str, list[int]] = {}
        self._watch_conversions()
        if options["switches"].get("convert_on_main_stream"):
            self._convert_on_main_stream()
        super().__init__(options)

    def choose_backend(self, options: dict[str, Any]) -> dict[str, Any]:
        """On GPUs "standard" and "flash" are vLLM's, "shuffled" is ours (backend.py)."""
        if self.device == "cpu":
            # Nothing else keeps standard pages there.
            backend = options["backend"].replace("flash", "standard")
            return super().choose_backend(options | {"backend": backend})
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        if options["backend"] in OF_VLLM:
            return {"attention_config": {"backend": OF_VLLM[options["backend"]]}}
        register_backend(AttentionBackendEnum.CUSTOM, SHUFFLED_BACKEND)
        return {"attention_config": {"backend": "CUSTOM"}}

    def _watch_conversions(self) -> None:
        submit = ConversionQueue.submit

        def noted(queue: ConversionQueue, *arguments: Any) -> Completion:
            self.converted_at.append(time.perf_counter())
            return submit(queue, *arguments)

        ConversionQueue.submit = noted  # type: ignore[assignment, method-assign]

    def _convert_on_main_stream(self) -> None:
        from kvpd import receive

        engine = self

        class MainStreamQueue(ConversionQueue):
            """Test only: what `ConversionQueue` runs on its side stream runs on the model's."""

            def submit(self, *arguments: Any) -> Completion:
                if self.device.type != "cpu":
                    self._stream = torch.cuda.current_stream(self.device)
                    for slot in self._slots:
                        slot._stream = self._stream
                    engine.main_stream_submits += 1
                return super().submit(*arguments)

        if vars(receive)["ConversionQueue"] is not ConversionQueue:
            raise RuntimeError("kvpd.receive has another queue than this one")
        vars(receive)["ConversionQueue"] = MainStreamQueue

    def snapshot_blocks(self, requested: list[int]) -> list[int]:
        """A whole cache has gigabytes."""
        return requested

    def _watch_requests(self) -> None:
        self._watch_frees()
        worker = self.connector_worker()
        if worker is not None:
            self._time_requests(worker)
        # Outside: what the bed notes for itself is not the connector's time.
        super()._watch_requests()

    def _watch_frees(self) -> None:
        manager = self.scheduler.kv_cache_manager
        free = manager.free

        def noted(request: Any) -> None:
            self.freed[request.request_id] = list(manager.get_block_ids(request.request_id)[0])
            free(request)

        manager.free = noted

    def _time_requests(self, worker: Any) -> None:
        start, results = worker.start_load_kv, worker.get_transfer_results
        unreported: dict[str, Load] = {}

        def timed_start(metadata: Any) -> None:
            began = time.perf_counter()
            start(metadata)
            seconds = time.perf_counter() - began
            for name in metadata.reqs_to_recv:
                self.loads[name] = unreported[name] = Load(began, seconds)

        def timed_results() -> Any:
            began = time.perf_counter()
            found = results()
            ended = time.perf_counter()
            for load in unreported.values():
                load.poll_seconds += ended - began
                load.num_polls += 1
            for name in found.finished_recving & unreported.keys():
                unreported.pop(name).reported = ended
            return found

        worker.start_load_kv, worker.get_transfer_results = timed_start, timed_results
        stats = type(worker.xfer_stats)
        if hasattr(stats, "record_ready"):
            record = stats.record_ready

            def noted(self_: Any, ready: Ready) -> None:
                self.ready[ready.request_id] = ready
                record(self_, ready)

            stats.record_ready = noted

    def step(self) -> bool:
        """As the base, at the pace of vLLM's own loop."""
        has_tokens = super().step()
        if not has_tokens and self.scheduler.has_requests():
            time.sleep(self.sleep_seconds)
        return has_tokens

    def do_device(self) -> dict[str, Any]:
        """What this engine runs on."""
        import triton

        facts: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__}
        if self.device == "cuda":
            facts["name"] = torch.cuda.get_device_name()
        return facts

    def do_blocks_of(self, name: str) -> list[int]:
        """The blocks that a finished request had; they hold its pages until somebody takes them."""
        (blocks,) = (self.freed[key] for key in self.freed if _is_request(key, name))
        return blocks

    def do_load(self, path: str, blocks: list[int]) -> None:
        """Overwrite these blocks with pages as `do_dump` wrote them."""
        pages = torch.from_numpy(np.load(path))
        for raw, of_layer in zip(self.raw_pages(), pages, strict=True):
            raw[blocks] = of_layer.reshape(len(blocks), *raw.shape[1:]).to(raw.device)
        if self.device == "cuda":
            torch.cuda.synchronize()

    def do_memory(self) -> dict[str, Any]:
        """Bytes of the slab (0 without one), of the GPU and free on it."""
        link = getattr(self.connector_worker(), "_link", None)
        receiver = None if link is None else link._receiver
        slab = None if receiver is None else receiver._slab
        free_bytes, total_bytes = torch.cuda.mem_get_info() if self.device == "cuda" else (0, 0)
        return {
            "slab_bytes": 0 if slab is None else slab.tensor.numel(),
            "free_bytes": free_bytes,
            "total_bytes": total_bytes,
            "num_blocks": self.engine.vllm_config.cache_config.num_gpu_blocks,
        }

    def do_hand_over(self, request: dict[str, Any]) -> dict[str, Any]:
        """Decode a prefilled request while nobody talks to this engine.

        Seconds from `start_load_kv` to reported finished, and how much of it the connector spent in
        the engine's thread, starting and polling; with kvpd's own answer, where its receiver read
        the request.
        """
        name = request["id"]
        self.do_submit([request])
        while not self.outputs.get(name, {}).get("finished"):
            self.step()
        (internal,) = (key for key in self.loads if _is_request(key, name))
        load, ready = self.loads[internal], self.ready.get(internal)
        return {
            "hand_over_seconds": load.reported - load.began,
            "thread_seconds": load.start_seconds + load.poll_seconds,
            "start_seconds": load.start_seconds,
            "poll_seconds": load.poll_seconds,
            "num_polls": load.num_polls,
            "ready": None if ready is None else dataclasses.asdict(ready),
        }

    def do_main_stream_submits(self) -> int:
        """How often the switch was used; 0 without it."""
        return self.main_stream_submits

    def do_decode_while_others_arrive(
        self, victim: dict[str, Any], arrivals: list[dict[str, Any]], spacing_tokens: int
    ) -> dict[str, Any]:
        """Decode one request; every `spacing_tokens` of its tokens another one arrives.

        Nothing else talks to this engine meanwhile. Times are seconds since the first token of
        the victim; an arrival's `taken_in` is spent by this process as the API server it also is,
        `converted` is when the host enqueued its conversion.
        """
        self.do_submit([victim])
        stamps: list[float] = []
        events: list[dict[str, float]] = []
        waiting, next_at = list(arrivals), spacing_tokens
        current: dict[str, Any] | None = None
        while not self.outputs.get(victim["id"], {}).get("finished"):
            self.step()
            now = time.perf_counter()
            num_tokens = len(self.outputs.get(victim["id"], {}).get("tokens", ()))
            stamps += [now] * (num_tokens - len(stamps))
            if current is not None and self.outputs.get(current["id"], {}).get("tokens"):
                events[-1]["first_token"] = now
                if self.converted_at and self.converted_at[-1] > events[-1]["arrived"]:
                    events[-1]["converted"] = self.converted_at[-1]
                current, next_at = None, num_tokens + spacing_tokens
            if current is None and waiting and num_tokens >= next_at:
                current = waiting.pop(0)
                events.append({"arrived": time.perf_counter()})
                self.do_submit([current])
                events[-1]["taken_in"] = time.perf_counter() - events[-1]["arrived"]
        for event in events:
            for key in {"arrived", "converted", "first_token"} & set(event):
                event[key] -= stamps[0]
        return {"stamps": [stamp - stamps[0] for stamp in stamps], "events": events}

    def do_first_tokens(self, arrivals: list[dict[str, Any]]) -> list[float]:
        """Submit all at once; seconds until each one's first token, in order of arrival."""
        self.do_submit(arrivals)
        began = time.perf_counter()
        seconds: dict[str, float] = {}
        while len(seconds) < len(arrivals):
            self.step()
            now = time.perf_counter()
            for request in arrivals:
                if request["id"] not in seconds and self.outputs.get(request["id"]):
                    seconds[request["id"]] = now - began
        return [seconds[request["id"]] for request in arrivals]


def _is_request(internal: str, name: str) -> bool:
    # vLLM appends a random suffix to the id it was given.
    return internal == name or internal.startswith(name + "-")


def main(options: dict[str, Any]) -> None:
    """Run an engine until its stdin ends; does not return."""
    bed.main(options, TimedEngine)
