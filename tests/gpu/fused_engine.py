"""One vLLM engine with torch.compile, full graphs and, if asked for, the RoPE fusion passes.

Run by tests/gpu/fused.py: options as JSON in the first argument, a JSON line with tokens and
replaced patterns out; after a line on stdin it is timed, and says so in a second one. What the test
bed changes in vLLM, and nothing else: `PassConfig` keeps the two fusions, which it switches off
where the platform is not ROCm; the QK-norm pass finds the operator that it names for quantised
queries, which is registered where AITER is installed only and is never called here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from typing import Any

import torch

FLAGS = ("fuse_rope_kvcache", "fuse_qk_norm_rope_kvcache")
PROMPT_TOKENS = (17, 100, 250, 300)
BATCH, WARM_STEPS, STEPS = 32, 20, 100
VOCABULARY = 512


def keep_fusions() -> None:
    """Let the flags survive the check for ROCm."""
    from vllm.config.compilation import PassConfig

    own = PassConfig.__post_init__

    def kept(config: Any) -> None:
        asked = [getattr(config, flag) for flag in FLAGS]
        own(config)
        for flag, value in zip(FLAGS, asked, strict=True):
            setattr(config, flag, value)

    PassConfig.__post_init__ = kept


def name_missing_operator() -> None:
    """Declare what the QK-norm pass's patterns for quantised queries are made of."""
    from vllm import _aiter_ops
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import direct_register_custom_op

    if hasattr(torch.ops.vllm, "rocm_aiter_per_tensor_quant"):
        return
    direct_register_custom_op(
        op_name="rocm_aiter_per_tensor_quant",
        op_func=_aiter_ops._rocm_aiter_per_tensor_quant_impl,
        mutates_args=["out", "scale"],
        fake_impl=lambda out, x, scale, is_dynamic: None,
        dispatch_key=current_platform.dispatch_key,
    )


def count_replacements() -> list[dict[str, Any]]:
    """What each fusion pass replaced in each graph that it was given, from now on."""
    from vllm.compilation.passes.fusion import qk_norm_rope_kvcache_fusion, rope_kvcache_fusion
    from vllm.compilation.passes.inductor_pass import get_pass_context

    found: list[dict[str, Any]] = []
    for kind in (
        rope_kvcache_fusion.RopeKVCacheFusionPass,
        qk_norm_rope_kvcache_fusion.QkNormRopeKvCacheFusionPass,
    ):
        own = kind.__call__

        def counted(self: Any, graph: Any, own: Any = own, name: str = kind.__name__) -> None:
            own(self, graph)
            found.append(
                {
                    "pass": name,
                    "range": str(get_pass_context().compile_range),
                    "replaced": self.matched_count,
                }
            )

        kind.__call__ = counted
    return found


def time_replays() -> list[tuple[Any, Any]]:
    """Events around every replay of a graph, from now on."""
    events: list[tuple[Any, Any]] = []
    own = torch.cuda.CUDAGraph.replay

    def timed(graph: Any) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        own(graph)
        end.record()
        events.append((start, end))

    torch.cuda.CUDAGraph.replay = timed  # type: ignore[assignment, method-assign]
    return events


def main(options: dict[str, Any]) -> None:
    """Run; does not return."""
    keep_fusions()
    name_missing_operator()
    replaced = count_replacements()
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, options["backend"])
    compilation: dict[str, Any] = {
        "mode": 3,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 8, BATCH],
        # Attention stays in the compiled graph: cache updates are fused only there.
        "splitting_ops": [],
        "pass_config": dict.fromkeys(options["fusions"], True),
    }
    kernels: dict[str, Any] = {}
    if options["has_norm_kernel"]:
        kernels = {"ir_op_priority": {"rms_norm": ["vllm_c", "native"]}}
    llm = LLM(
        model=options["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        seed=0,
        max_model_len=1024,
        block_size=16,
        num_gpu_blocks_override=2048,
        kv_cache_memory_bytes=options["cache_bytes"],
        gpu_memory_utilization=0.05,
        max_num_batched_tokens=1024,
        max_num_seqs=BATCH,
        enable_prefix_caching=False,
        attention_config={"backend": "CUSTOM"},
        compilation_config=compilation,
        kernel_config=kernels,
    )
    generator = torch.Generator().manual_seed(5)

    def prompt(count: int) -> dict[str, Any]:
        drawn = torch.randint(0, VOCABULARY - 1, (count,), generator=generator)
        return {"prompt_token_ids": drawn.tolist()}

    def tokens(prompts: list[Any], count: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        answers = llm.generate(prompts, params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    alone = [tokens([prompt(count)], 24)[0] for count in PROMPT_TOKENS]
    together = tokens([prompt(5 + 3 * index) for index in range(BATCH)], 24)
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    say(
        {
            "alone": alone,
            "together": together,
            "replaced": replaced,
            "implementations": sorted({type(layer.impl).__name__ for layer in context.values()}),
            "custom_ops": llm.llm_engine.vllm_config.compilation_config.custom_ops,
        }
    )
    sys.stdin.readline()
    say(timed_decode(llm, [prompt(64) for _ in range(BATCH)], SamplingParams))
    sys.stdout.flush()
    os._exit(0)


def timed_decode(llm: Any, prompts: list[Any], params: Any) -> dict[str, Any]:
    """Times of decode steps of a full batch: the graph on the GPU, and the whole step."""
    events = time_replays()
    engine = llm.llm_engine
    options = params(temperature=0.0, max_tokens=WARM_STEPS + STEPS + 10, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"timed-{index}", prompt, options)
    stamps = []
    while engine.has_unfinished_requests():
        engine.step()
        stamps.append(time.perf_counter())
    torch.cuda.synchronize()
    graph_ms = [start.elapsed_time(end) for start, end in events]
    steps = [1e3 * (b - a) for a, b in pairwise(stamps)]
    window = slice(WARM_STEPS, WARM_STEPS + STEPS)
    return {"graph_ms": graph_ms[window], "step_ms": steps[window], "replays": len(events)}


def say(what: dict[str, Any]) -> None:
    print("RESULT " + json.dumps(what), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
