"""What to say to a flag that `raycomb serve` does not know: what it is here, for those of vLLM and SGLang, and else
what may have been meant. Flags that mean the same here have the same names, and are not in here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

ALIKE: Final = 0.85
"""From 0 to 1: a name that is less like ours was meant for something else."""

_ONE_GPU: Final = "not supported: a model has one GPU, and --num-workers makes more copies of it"
_COPIES: Final = "here --num-workers: copies of the model, each on a GPU of its own"
_FIRST_WORD: Final = "here the first word: `raycomb serve MODEL`"
_NO_DRAFTS: Final = "not supported: tokens are drawn one at a time"
_BY_TEMPLATE: Final = "not needed: how a model calls tools and tells thoughts is read from its chat template"
_ALWAYS: Final = "not needed: it is always so"
_TLS: Final = "not supported: TLS is ended in front of the service, as by deploy/tls-proxy.cfg"
_IN_MODEL: Final = "not supported: it is read from the model's own files"
_SCHEDULE: Final = "not needed: a request's priority goes first, then --tenant-weights, then who came first"

ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        # vLLM's `serve`
        "--model": _FIRST_WORD,
        "--tensor-parallel-size": _ONE_GPU,
        "-tp": _ONE_GPU,
        "--pipeline-parallel-size": _ONE_GPU,
        "-pp": _ONE_GPU,
        "--enable-expert-parallel": _ONE_GPU,
        "--data-parallel-size": _COPIES,
        "-dp": _COPIES,
        "--api-server-count": "here --num-gateways",
        "--enable-prefix-caching": "here --prefix-caching, which is on unless --no-prefix-caching says otherwise",
        "--no-enable-prefix-caching": "here --no-prefix-caching",
        "--enable-chunked-prefill": f"{_ALWAYS}; --prefill-chunk-tokens says how long a turn is",
        "--enforce-eager": "here --no-cuda-graph",
        "--num-gpu-blocks-override": "here --max-cells, in tokens",
        "--block-size": "not supported: a cell holds one token",
        "--cpu-offload-gb": "not supported: weights stay on the device; --swap-space is for preempted sequences",
        "--tokenizer": _IN_MODEL,
        "--chat-template": f"{_IN_MODEL}: put chat_template.jinja beside its config.json",
        "--generation-config": "not supported: requests say how tokens are drawn",
        "--hf-overrides": "not supported: change the model's config.json",
        "--trust-remote-code": "not supported: no code of a model's folder is ever run",
        "--revision": "not supported: fetch that revision, and give its folder as the model",
        "--download-dir": "not supported: the variable HF_HOME says where models of the hub are kept",
        "--enable-auto-tool-choice": _BY_TEMPLATE,
        "--tool-call-parser": _BY_TEMPLATE,
        "--reasoning-parser": _BY_TEMPLATE,
        "--guided-decoding-backend": f"{_ALWAYS}: answers follow grammars by llguidance",
        "--speculative-config": _NO_DRAFTS,
        "--distributed-executor-backend": f"{_ALWAYS}: Ray",
        "--scheduling-policy": _SCHEDULE,
        "--enable-log-requests": "here --log-requests",
        "--disable-log-requests": "here --no-log-requests, which is the default",
        "--disable-log-stats": "not supported: /metrics is always there, and nothing is logged of it",
        "--task": "not needed: /v1/embeddings is there beside completions and chats",
        "--runner": "not needed: /v1/embeddings is there beside completions and chats",
        "--limit-mm-per-prompt": "not supported: models read text alone",
        "--ssl-certfile": _TLS,
        "--ssl-keyfile": _TLS,
        "--allowed-origins": "here `http: {cors_origins: [...]}` in a file of `serve deploy`; any page may ask",
        "--root-path": "not supported: the paths begin with /v1; let what stands in front rewrite them",
        "--otlp-traces-endpoint": "here --otlp-endpoint",
        # SGLang's `launch_server`
        "--model-path": _FIRST_WORD,
        "--tp-size": _ONE_GPU,
        "--tp": _ONE_GPU,
        "--pp-size": _ONE_GPU,
        "--ep-size": _ONE_GPU,
        "--dp-size": _COPIES,
        "--dp": _COPIES,
        "--context-length": "here --max-model-len",
        "--mem-fraction-static": "here --gpu-memory-utilization, which counts weights, work and pool together",
        "--max-running-requests": "here --max-num-seqs",
        "--max-queued-requests": "here --max-waiting",
        "--max-total-tokens": "here --max-cells",
        "--chunked-prefill-size": "here --prefill-chunk-tokens for one sequence, --max-num-batched-tokens for a step",
        "--page-size": "not supported: a cell holds one token",
        "--disable-radix-cache": "here --no-prefix-caching",
        "--disable-cuda-graph": "here --no-cuda-graph",
        "--random-seed": "here --seed",
        "--schedule-policy": _SCHEDULE,
        "--attention-backend": "not supported: there is one, of our own",
        "--grammar-backend": f"{_ALWAYS}: answers follow grammars by llguidance",
        "--tokenizer-path": _IN_MODEL,
        "--json-model-override-args": "not supported: change the model's config.json",
        "--lora-paths": "here --lora-modules",
        "--max-loras-per-batch": "here --max-loras",
        "--speculative-algorithm": _NO_DRAFTS,
        "--enable-metrics": _ALWAYS,
        "--is-embedding": "not needed: /v1/embeddings is there beside completions and chats",
    }
)
"""What each of their flags is here."""


def advice(unknown: Iterable[str], known: Iterable[str]) -> str | None:
    """What to use instead of the first flag in `unknown`, words of a command line that takes the flags `known`. None
    where nothing can be said of it."""
    flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
    if flag is None:
        return None
    flag = flag.replace("_", "-")
    if flag in ELSEWHERE:
        return f"{flag} is {ELSEWHERE[flag]}"
    close = difflib.get_close_matches(flag, list(known), n=1, cutoff=ALIKE)
    return f"did you mean {close[0]}?" if close else None
