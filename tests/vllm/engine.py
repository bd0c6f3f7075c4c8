"""One vLLM engine in its own process, driven by JSON lines on stdin (see client.py).

Between commands the engine keeps stepping, as a serving loop would: a prefill has to notice
that its blocks were read. Everything that the test bed replaces is named here: the attention
backend of the CPU platform; on CPUs, how long NIXL and vLLM wait for others (tests/patience.py).
"""

from __future__ import annotations

import json
import os
import select
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch


class Engine:
    """An in-process vLLM engine and the raw bytes of its cache."""

    # How long a command is waited for after a step that gave tokens, after one that did not (its
    # requests wait for other threads, which need a core and this interpreter), and while idle.
    busy_wait_seconds = 0.0005
    poll_wait_seconds = 0.01
    idle_wait_seconds = 0.02

    def __init__(self, options: dict[str, Any]) -> None:
        chosen = self.choose_backend(options)
        if options["record_nixl"]:
            from tests.vllm import fakes

            fakes.record_all()
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = options.get("kv_transfer_config")
        arguments: dict[str, Any] = {
            "model": options["model"],
            "dtype": options["dtype"],
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "seed": 0,
            "max_model_len": options["max_model_len"],
            "block_size": options["block_size"],
            "num_gpu_blocks_override": options["num_blocks"],
            "max_num_batched_tokens": options["max_num_batched_tokens"],
            "max_num_seqs": 8,
            "enable_prefix_caching": options["enable_prefix_caching"],
            "disable_log_stats": False,
            "kv_transfer_config": KVTransferConfig(**transfer) if transfer else None,
        }
        self.llm = LLM(**(arguments | chosen | options.get("llm_args", {})))
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        self.outputs: dict[str, dict[str, Any]] = {}
        self.received: dict[str, dict[str, Any]] = {}
        self.requested: dict[str, list[int]] = {}
        self.snapshot_dir: Path | None = None
        self._watch_requests()

    def choose_backend(self, options: dict[str, Any]) -> dict[str, Any]:
        """Register the attention backend; the arguments of `LLM` that select it."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        from tests.patience import let_handshakes_wait, let_nixl_wait
        from tests.vllm import backends

        let_nixl_wait()
        let_handshakes_wait()
        backend = backends.BACKENDS[options["backend"]]
        if options.get("backend_name"):
            backend.name = options["backend_name"]
        # The CPU platform always resolves to CPU_ATTN; an override of that member is honoured.
        register_backend(
            AttentionBackendEnum.CPU_ATTN, f"{backend.__module__}.{backend.__qualname__}"
        )
        return {}

    def _watch_requests(self) -> None:
        """Note which local blocks each request asks the connector for; changes nothing."""
        worker = self.connector_worker()
        if worker is None:
            return
        start = worker.start_load_kv

        def watched(metadata: Any) -> None:
            for name, meta in metadata.reqs_to_recv.items():
                self.requested[name] = [block for group in meta.local_block_ids for block in group]
            start(metadata)

        worker.start_load_kv = watched

    # ------------------------------------------------------------------ cache bytes

    def layers(self) -> dict[str, torch.Tensor]:
        context = self.runner.compilation_config.static_forward_context
        return {
            name: layer.kv_cache for name, layer in context.items() if hasattr(layer, "kv_cache")
        }

    def storages(self) -> list[torch.Tensor]:
        """Every distinct allocation of the cache, as bytes."""
        seen: dict[int, torch.Tensor] = {}
        for cache in self.layers().values():
            storage = cache.untyped_storage()
            raw = torch.empty(0, dtype=torch.uint8, device=cache.device)
            seen[storage.data_ptr()] = raw.set_(storage, 0, (storage.nbytes(),), (1,))
        return [seen[address] for address in sorted(seen)]

    def pages(self, blocks: list[int] | None = None) -> np.ndarray:
        """The bytes of these blocks' pages, all by default: [layer, block, page bytes].

        Head slots are in order. Read through data pointers and real strides only; nothing is
        reinterpreted.
        """
        per_layer = []
        for raw in self.raw_pages():
            wanted = raw if blocks is None else raw[blocks]
            per_layer.append(wanted.reshape(len(wanted), -1).cpu())
        return torch.stack(per_layer).numpy()

    def raw_pages(self) -> list[torch.Tensor]:
        """The cache's own bytes, for each layer [block, head slot, slot bytes]."""
        per_layer = []
        for name in sorted(self.layers()):
            cache = self.layers()[name]
            size = cache.element_size()
            per_layer.append(
                torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
                    cache.untyped_storage(),
                    cache.storage_offset() * size,
                    (cache.shape[0], cache.shape[1], cache.shape[2] * cache.shape[3] * size),
                    (cache.stride(0) * size, cache.stride(1) * size, 1),
                )
            )
        return per_layer

    def describe(self) -> dict[str, Any]:
        import vllm

        layers = self.layers()
        static = self.runner.compilation_config.static_forward_context
        worker = self.connector_worker()
        return {
            "vllm": vllm.__version__,
            "implementations": sorted({type(static[name].impl).__name__ for name in layers}),
            "backends": sorted({static[name].attn_backend.get_name() for name in layers}),
            "layout": self.engine.vllm_config.cache_config.kv_cache_layout,
            "shapes": sorted({tuple(cache.shape) for cache in layers.values()}),
            "strides": sorted({cache.stride() for cache in layers.values()}),
            "layers": sorted(layers),
            "connector": type(worker).__module__ + "." + type(worker).__name__ if worker else None,
            "region_bytes": list(worker.block_len_per_layer) if worker else None,
        }

    def connector_worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return get_kv_transfer_group().connector_worker if has_kv_transfer_group() else None

    # ------------------------------------------------------------------ commands

    def do_describe(self) -> dict[str, Any]:
        return self.describe()

    def do_poison(self, seed: int) -> None:
        """Overwrite the whole cache with seeded bytes: what was not written stays recognisable."""
        for raw in self.storages():
            generator = torch.Generator(raw.device).manual_seed(seed)
            raw.random_(0, 256, generator=generator)

    def do_dump(self, path: str, blocks: list[int] | None = None) -> None:
        np.save(path, self.pages(blocks))

    def do_snapshot_received(self, directory: str | None) -> None:
        """From now on, save the cache whenever a request is reported received, before it runs."""
        self.snapshot_dir = None if directory is None else Path(directory)

    def snapshot_blocks(self, requested: list[int]) -> list[int] | None:
        """Which blocks a snapshot of a request holds; None for all."""
        return None

    def do_submit(self, requests: list[dict[str, Any]]) -> None:
        from vllm import SamplingParams

        for request in requests:
            extra = request.get("kv_transfer_params")
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                extra_args={"kv_transfer_params": extra} if extra else None,
            )
            self.engine.add_request(request["id"], {"prompt_token_ids": request["prompt"]}, params)

    def do_abort(self, ids: list[str]) -> None:
        self.engine.abort_request(ids)

    def do_results(self) -> dict[str, Any]:
        return {"outputs": self.outputs, "received": self.received}

    def do_metrics(self) -> dict[str, float]:
        from prometheus_client import REGISTRY  # type: ignore[import-not-found,unused-ignore]

        return {
            sample.name
            + "".join(
                f" {key}={value}"
                for key, value in sorted(sample.labels.items())
                if key not in ("engine", "model_name")
            ): sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name.startswith(("vllm:nixl", "vllm:kvpd", "vllm:num_preemptions"))
            and not sample.name.endswith(("_bucket", "_created"))
        }

    def do_evaluate(self, source: str) -> Any:
        """Run test code here: `engine` is this object, what is put in `result` comes back."""
        scope: dict[str, Any] = {"engine": self, "torch": torch, "np": np, "result": None}
        exec(source, scope)
        return scope["result"]

    def step(self) -> bool:
        """Whether there were tokens."""
        if not (self.scheduler.has_requests() or self.engine.has_unfinished_requests()):
            return False
        outputs = self.engine.step()
        for output in outputs:
            entry = self.outputs.setdefault(output.request_id, {"tokens": [], "finished": False})
            entry["tokens"] = list(output.outputs[0].token_ids)
            entry["finished"] = output.finished
            entry["finish_reason"] = output.outputs[0].finish_reason
            if output.kv_transfer_params:
                entry["kv_transfer_params"] = output.kv_transfer_params
            if output.finished:
                entry["num_cached_tokens"] = output.num_cached_tokens
        self._note_received()
        return bool(outputs)

    def _note_received(self) -> None:
        for internal in self.scheduler.finished_recving_kv_req_ids:
            request = self.scheduler.requests.get(internal)
            if request is None or internal in self.received:
                continue
            blocks = self.scheduler.kv_cache_manager.get_block_ids(internal)
            entry: dict[str, Any] = {
                "blocks": [list(group) for group in blocks],
                "requested": self.requested.get(internal, []),
            }
            if self.snapshot_dir is not None:
                path = self.snapshot_dir / f"received-{len(self.received)}.npy"
                np.save(path, self.pages(self.snapshot_blocks(entry["requested"])))
                entry["pages"] = str(path)
            self.received[internal] = entry


def serve(engine: Engine, commands: TextIO, replies: TextIO) -> None:
    buffer, has_tokens = "", False
    while True:
        if not engine.scheduler.has_requests():
            wait_seconds = engine.idle_wait_seconds
        else:
            wait_seconds = engine.busy_wait_seconds if has_tokens else engine.poll_wait_seconds
        ready, _, _ = select.select([commands], [], [], wait_seconds)
        if ready:
            chunk = os.read(commands.fileno(), 1 << 20).decode()
            if not chunk:
                return
            buffer += chunk
            while "\n" in buffer:
                line, buffer = buffer.split("\n", 1)
                message = json.loads(line)
                if message["command"] == "stop":
                    reply(replies, {"value": None})
                    return
                try:
                    handler = getattr(engine, "do_" + message["command"])
                    reply(replies, {"value": handler(**message.get("arguments", {}))})
                except Exception:
                    reply(replies, {"error": traceback.format_exc()})
        try:
            has_tokens = engine.step()
        except Exception:
            reply(replies, {"fatal": traceback.format_exc()})
            return


def reply(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def main(options: dict[str, Any], kind: type[Engine] = Engine) -> None:
    """Run an engine until its stdin ends; does not return."""
    # vLLM and its libraries print; only the duplicated descriptor carries the protocol.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        engine = kind(options)
    except BaseException:
        reply(replies, {"fatal": traceback.format_exc()})
        raise
    reply(replies, {"value": engine.describe()})
    serve(engine, sys.stdin, replies)
    replies.flush()
    os._exit(0)
