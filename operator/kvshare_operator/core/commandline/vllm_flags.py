"""vLLM's own option names and how many values each takes.

Why this exists: to know where an option's values end and which abbreviations are unique, one needs the whole
list. A test compares it with the installed vLLM's parser. Aliases of one option are joined by ``|``. Options
that a newer vLLM adds are simply not here: the reader then takes the words that follow as their values.
"""

from __future__ import annotations

from typing import Final


def _groups(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(item.split("|")) for item in text.split())


SWITCHES: Final = _groups(
    """
    -h|--help --headless --grpc --trust-request-chat-template|--no-trust-request-chat-template
    --trust-request-mm-kwargs|--no-trust-request-mm-kwargs
    --return-tokens-as-token-ids|--no-return-tokens-as-token-ids
    --enable-auto-tool-choice|--no-enable-auto-tool-choice
    --exclude-tools-when-tool-choice-none|--no-exclude-tools-when-tool-choice-none
    --enable-prompt-tokens-details|--no-enable-prompt-tokens-details
    --enable-per-request-metrics|--no-enable-per-request-metrics
    --enable-server-load-tracking|--no-enable-server-load-tracking
    --enable-force-include-usage|--no-enable-force-include-usage
    --enable-tokenizer-info-endpoint|--no-enable-tokenizer-info-endpoint
    --enable-log-outputs|--no-enable-log-outputs --enable-log-deltas|--no-enable-log-deltas
    --cohere-is-reasoning-model|--no-cohere-is-reasoning-model --log-error-stack|--no-log-error-stack
    --tokens-only|--no-tokens-only --enable-scale-out|--no-enable-scale-out
    --disable-uvicorn-access-log|--no-disable-uvicorn-access-log
    --allow-credentials|--no-allow-credentials --enable-ssl-refresh|--no-enable-ssl-refresh
    --enable-request-id-headers|--no-enable-request-id-headers
    --disable-fastapi-docs|--no-disable-fastapi-docs --enable-offline-docs|--no-enable-offline-docs
    --enable-flash-late-interaction|--no-enable-flash-late-interaction
    --trust-remote-code|--no-trust-remote-code
    --allow-deprecated-quantization|--no-allow-deprecated-quantization
    --enforce-eager|--no-enforce-eager --enable-return-routed-experts|--no-enable-return-routed-experts
    --return-sampling-mask|--no-return-sampling-mask --use-fp64-gumbel|--no-use-fp64-gumbel
    --enable-trace-replay|--no-enable-trace-replay --disable-sliding-window|--no-disable-sliding-window
    --disable-cascade-attn|--no-disable-cascade-attn --skip-tokenizer-init|--no-skip-tokenizer-init
    --enable-prompt-embeds|--no-enable-prompt-embeds --enable-sleep-mode|--no-enable-sleep-mode
    --sleep-mode-offload-cudagraph|--no-sleep-mode-offload-cudagraph
    --enable-cumem-allocator|--no-enable-cumem-allocator
    --enable-nccl-comm-suspend|--no-enable-nccl-comm-suspend --use-tqdm-on-load|--no-use-tqdm-on-load
    --enable-mamba-cache-stochastic-rounding|--no-enable-mamba-cache-stochastic-rounding
    --numa-bind|--no-numa-bind --dcp-q-replicate|--no-dcp-q-replicate
    --data-parallel-hybrid-lb|--no-data-parallel-hybrid-lb|-dph
    --data-parallel-external-lb|--no-data-parallel-external-lb|-dpe
    --data-parallel-multi-port-external-lb|-dpm --enable-hc-sp|--no-enable-hc-sp
    --enable-expert-parallel|--no-enable-expert-parallel|-ep
    --enable-batch-sharded-sampling|--no-enable-batch-sharded-sampling
    --enable-ep-weight-filter|--no-enable-ep-weight-filter --enable-dbo|--no-enable-dbo
    --enable-shm-tensor-arena|--no-enable-shm-tensor-arena --enable-elastic-ep|--no-enable-elastic-ep
    --disable-nccl-for-dp-synchronization|--no-disable-nccl-for-dp-synchronization
    --enable-eplb|--no-enable-eplb --ray-workers-use-nsight|--no-ray-workers-use-nsight
    --disable-custom-all-reduce|--no-disable-custom-all-reduce
    --enable-fault-tolerance|--no-enable-fault-tolerance
    --enable-prefix-caching|--no-enable-prefix-caching
    --kv-sharing-fast-prefill|--no-kv-sharing-fast-prefill --swa-bounded-replay|--no-swa-bounded-replay
    --enable-mamba-shared-prefix-checkpoint|--no-enable-mamba-shared-prefix-checkpoint
    --use-replayssm|--no-use-replayssm --language-model-only|--no-language-model-only
    --enable-mm-embeds|--no-enable-mm-embeds --mm-encoder-only|--no-mm-encoder-only
    --interleave-mm-strings|--no-interleave-mm-strings --skip-mm-profiling|--no-skip-mm-profiling
    --mm-device-do-normalize|--no-mm-device-do-normalize --enable-lora|--no-enable-lora
    --enable-tower-connector-lora|--no-enable-tower-connector-lora
    --fully-sharded-loras|--no-fully-sharded-loras --specialize-active-lora|--no-specialize-active-lora
    --enable-mixed-moe-lora-format|--no-enable-mixed-moe-lora-format
    --enable-moe-shared-loras|--no-enable-moe-shared-loras --kv-cache-metrics|--no-kv-cache-metrics
    --cudagraph-metrics|--no-cudagraph-metrics
    --enable-layerwise-nvtx-tracing|--no-enable-layerwise-nvtx-tracing
    --enable-mfu-metrics|--no-enable-mfu-metrics
    --enable-logging-iteration-details|--no-enable-logging-iteration-details
    --jit-monitor-verbose|--no-jit-monitor-verbose
    --long-prefill-token-threshold-adaptive|--no-long-prefill-token-threshold-adaptive
    --enable-chunked-prefill|--no-enable-chunked-prefill
    --disable-chunked-mm-input|--no-disable-chunked-mm-input
    --scheduler-reserve-full-isl|--no-scheduler-reserve-full-isl
    --disable-hybrid-kv-cache-manager|--no-disable-hybrid-kv-cache-manager
    --async-scheduling|--no-async-scheduling
    --enable-flashinfer-autotune|--no-enable-flashinfer-autotune --disable-log-stats
    --aggregate-engine-logging --fail-on-environ-validation|--no-fail-on-environ-validation
    --enable-log-requests|--no-enable-log-requests
    """
)
"""Options without a value."""

SINGLE: Final = _groups(
    """
    --hf-token --api-server-count|-asc --config --chat-template --chat-template-content-format
    --default-chat-template-kwargs --response-role --tool-call-parser --tool-parser-plugin
    --tool-strict-level --tool-server --max-log-len --sse-keep-alive-interval --cohere-format
    --anthropic-disabled-thinking-effort --fingerprint-mode --fingerprint-value --host --port
    --grpc-port --data-parallel-supervisor-port --dp-supervisor-probe-interval-s
    --dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold --uds --uvicorn-log-level
    --disable-access-log-for-endpoints --allowed-origins --allowed-methods --allowed-headers
    --ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers --root-path --middleware
    --h11-max-incomplete-event-size --h11-max-header-count --model --runner --convert --tokenizer
    --tokenizer-mode --dtype --seed --hf-config-path --allowed-local-media-path --revision
    --code-revision --tokenizer-revision --max-model-len --quantization|-q --quantization-config
    --max-logprobs --logprobs-mode --config-format --hf-overrides --model-class-overrides
    --pooler-config --generation-config --override-generation-config --model-impl --io-processor-plugin
    --renderer-num-workers --load-format --download-dir --safetensors-load-strategy
    --safetensors-prefetch-num-threads --safetensors-prefetch-block-size --model-loader-extra-config
    --pt-load-map-location --attention-backend --mamba-backend --mamba-ssu-algorithm
    --mamba-cache-philox-rounds --reasoning-parser --reasoning-parser-plugin
    --distributed-executor-backend --pipeline-parallel-size|-pp --master-addr --master-port --nnodes|-n
    --node-rank|-r --distributed-timeout-seconds --cpu-distributed-timeout-seconds --device-ids
    --tensor-parallel-size|-tp --decode-context-parallel-size|-dcp --dcp-comm-backend
    --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size --prefill-context-parallel-size|-pcp
    --data-parallel-size|-dp --data-parallel-rank|-dpn --data-parallel-start-rank|-dpr
    --data-parallel-size-local|-dpl --data-parallel-address|-dpa --data-parallel-rpc-port|-dpp
    --data-parallel-backend|-dpb --all2all-backend --ubatch-size --elastic-ep-max-dp-size
    --dbo-decode-token-threshold --dp-sync-interval --dbo-prefill-token-threshold --eplb-config
    --expert-placement-strategy --max-parallel-loading-workers --worker-cls --worker-extension-cls
    --fault-tolerance-config --block-size --gpu-memory-utilization|--device-memory-utilization
    --kv-cache-memory-bytes --kv-cache-dtype --num-gpu-blocks-override --prefix-caching-hash-algo
    --prefix-cache-retention-interval --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size
    --prefix-match-unit --mamba-cache-mode --replayssm-buffer-len --kv-offloading-size
    --kv-offloading-backend --offload-backend --cpu-offload-gb --offload-group-size
    --offload-num-in-group --offload-prefetch-step --limit-mm-per-prompt --media-io-kwargs
    --mm-processor-kwargs --mm-processor-cache-gb --mm-processor-cache-type --mm-hasher-algorithm
    --mm-shm-cache-max-object-size-mb --mm-encoder-tp-mode --mm-encoder-attn-backend
    --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path
    --mm-encoder-fp8-scale-save-margin --video-pruning-rate --video-pruning-method --mm-tensor-ipc
    --mm-processor-device --mm-ipc-gpu-memory-gb --max-loras --max-lora-rank --lora-dtype
    --max-cpu-loras --default-mm-loras --max-lora-cls-labels --logging-config --log-level
    --log-config-file --show-hidden-metrics-for-version --otlp-traces-endpoint
    --per-request-spec-decode-metrics --kv-cache-metrics-sample --custom-histogram-buckets
    --jit-monitor-mode --max-num-batched-tokens --max-num-scheduled-tokens --max-num-seqs
    --max-num-active-seqs --max-num-queued-reqs --max-num-queued-tokens --long-prefill-token-threshold
    --scheduling-policy --scheduler-cls --watermark --prefill-schedule-interval --stream-interval
    --max-cudagraph-capture-size --ir-op-priority --moe-backend --linear-backend
    --sparse-indexer-topk-backend --speculative-config|-sc --spec-method --spec-model --spec-tokens
    --watermark-config --diffusion-config|-dc --kv-transfer-config --kv-events-config
    --ec-transfer-config --ec-manager-config --compilation-config|-cc --attention-config|-ac
    --engram-config --reasoning-config --kernel-config --additional-config --structured-outputs-config
    --aux-output-config --profiler-config --optimization-level --performance-mode
    --weight-transfer-config --shutdown-timeout --gdn-prefill-backend --kda-prefill-backend
    --kda-decode-backend
    """
)
"""Options with exactly one value."""

SEVERAL: Final = _groups(
    """
    --lora-modules --api-key --allowed-media-domains --served-model-name
    --sleep-preserve-parameter-names --logits-processors --ignore-patterns --numa-bind-nodes
    --numa-bind-cpus --kv-cache-dtype-skip-layers --cpu-offload-params --offload-params
    --lora-target-modules --collect-detailed-traces --cudagraph-capture-sizes
    """
)
"""Options with any number of values."""

CANONICAL: Final[dict[str, str]] = {name: group[0] for group in (*SWITCHES, *SINGLE, *SEVERAL) for name in group}
"""Every spelling -> the option's first spelling."""

ARITY: Final[dict[str, int | None]] = {
    **{group[0]: 0 for group in SWITCHES},
    **{group[0]: 1 for group in SINGLE},
    **{group[0]: None for group in SEVERAL},
}
"""First spelling -> number of values; None means any number."""
