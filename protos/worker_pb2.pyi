from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_NONE: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_FAILED: _ClassVar[FinishReason]
    FINISH_REASON_REFUSED: _ClassVar[FinishReason]
POOLING_NONE: Pooling
POOLING_LAST: Pooling
POOLING_MEAN: Pooling
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_FAILED: FinishReason
FINISH_REASON_REFUSED: FinishReason

class Command(_message.Message):
    __slots__ = ("submit", "cancel", "read", "recall")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    RECALL_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    read: Read
    recall: Recall
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., read: _Optional[_Union[Read, _Mapping]] = ..., recall: _Optional[_Union[Recall, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "prompt", "max_tokens", "min_tokens", "stop_token_ids", "n", "priority", "prompt_logprobs", "sampling", "num_generated", "tenant", "timeout_ms", "traceparent", "pooling", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    n: int
    priority: int
    prompt_logprobs: bool
    sampling: Sampling
    num_generated: int
    tenant: str
    timeout_ms: int
    traceparent: str
    pooling: Pooling
    adapter: Adapter
    def __init__(self, request_id: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., n: _Optional[int] = ..., priority: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., num_generated: _Optional[int] = ..., tenant: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "revision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: int
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class Adapters(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "grammar", "bad_words")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    grammar: str
    bad_words: _containers.RepeatedCompositeFieldContainer[Word]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[str] = ..., bad_words: _Optional[_Iterable[_Union[Word, _Mapping]]] = ...) -> None: ...

class Word(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "indices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class Recall(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    def __init__(self, request_id: _Optional[int] = ...) -> None: ...

class Read(_message.Message):
    __slots__ = ("num_messages",)
    NUM_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    num_messages: int
    def __init__(self, num_messages: _Optional[int] = ...) -> None: ...

class StepUpdates(_message.Message):
    __slots__ = ("info", "updates", "snapshot", "blocks", "totals", "adapters", "beside_engine")
    INFO_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    BESIDE_ENGINE_FIELD_NUMBER: _ClassVar[int]
    info: WorkerInfo
    updates: _containers.RepeatedCompositeFieldContainer[SequenceUpdate]
    snapshot: Snapshot
    blocks: Blocks
    totals: Totals
    adapters: Adapters
    beside_engine: bool
    def __init__(self, info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., updates: _Optional[_Iterable[_Union[SequenceUpdate, _Mapping]]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., blocks: _Optional[_Union[Blocks, _Mapping]] = ..., totals: _Optional[_Union[Totals, _Mapping]] = ..., adapters: _Optional[_Union[Adapters, _Mapping]] = ..., beside_engine: _Optional[bool] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("added", "removed")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    added: _containers.RepeatedScalarFieldContainer[int]
    removed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, added: _Optional[_Iterable[int]] = ..., removed: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "model", "vocab_size", "context", "num_cells", "max_prefill_tokens", "min_prefill_tokens", "max_num_seqs", "device", "dtype", "vector_size")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_CELLS_FIELD_NUMBER: _ClassVar[int]
    MAX_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VECTOR_SIZE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    model: str
    vocab_size: int
    context: int
    num_cells: int
    max_prefill_tokens: int
    min_prefill_tokens: int
    max_num_seqs: int
    device: str
    dtype: str
    vector_size: int
    def __init__(self, worker_id: _Optional[str] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context: _Optional[int] = ..., num_cells: _Optional[int] = ..., max_prefill_tokens: _Optional[int] = ..., min_prefill_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., vector_size: _Optional[int] = ...) -> None: ...

class SequenceUpdate(_message.Message):
    __slots__ = ("request_id", "index", "tokens", "logprobs", "prompt_logprobs", "num_cached_tokens", "finish_reason", "error", "vector")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    index: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    num_cached_tokens: int
    finish_reason: FinishReason
    error: Error
    vector: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[int] = ..., index: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., vector: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token", "logprob", "top_tokens", "top_logprobs")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "param", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    param: str
    retry_after_s: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("capacity", "free_cells", "owned_cells", "cached_cells", "num_running", "num_waiting", "queued_prefill_tokens", "step", "draining", "queue_tokens_per_s", "answer_tokens", "ends_per_token", "newest_request")
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    FREE_CELLS_FIELD_NUMBER: _ClassVar[int]
    OWNED_CELLS_FIELD_NUMBER: _ClassVar[int]
    CACHED_CELLS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NEWEST_REQUEST_FIELD_NUMBER: _ClassVar[int]
    capacity: int
    free_cells: int
    owned_cells: int
    cached_cells: int
    num_running: int
    num_waiting: int
    queued_prefill_tokens: int
    step: int
    draining: bool
    queue_tokens_per_s: float
    answer_tokens: int
    ends_per_token: float
    newest_request: int
    def __init__(self, capacity: _Optional[int] = ..., free_cells: _Optional[int] = ..., owned_cells: _Optional[int] = ..., cached_cells: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., step: _Optional[int] = ..., draining: _Optional[bool] = ..., queue_tokens_per_s: _Optional[float] = ..., answer_tokens: _Optional[int] = ..., ends_per_token: _Optional[float] = ..., newest_request: _Optional[int] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("prompt_tokens_computed", "tokens_generated", "decode_tokens", "prefill_tokens", "padded_rows", "prefill_forwards", "decode_forwards", "prefix_queries", "prefix_hits", "preemptions", "finished", "queue_time", "decode_step_time", "prefill_step_time", "mixed_step_time", "cells_swapped_out", "cells_swapped_in", "streams_refused", "tokens_forced")
    class DecodeForwardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class FinishedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PADDED_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_FORWARDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    MIXED_STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    CELLS_SWAPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    CELLS_SWAPPED_IN_FIELD_NUMBER: _ClassVar[int]
    STREAMS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FORCED_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens_computed: int
    tokens_generated: int
    decode_tokens: int
    prefill_tokens: int
    padded_rows: int
    prefill_forwards: int
    decode_forwards: _containers.ScalarMap[int, int]
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    finished: _containers.ScalarMap[int, int]
    queue_time: Distribution
    decode_step_time: Distribution
    prefill_step_time: Distribution
    mixed_step_time: Distribution
    cells_swapped_out: int
    cells_swapped_in: int
    streams_refused: int
    tokens_forced: int
    def __init__(self, prompt_tokens_computed: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., padded_rows: _Optional[int] = ..., prefill_forwards: _Optional[int] = ..., decode_forwards: _Optional[_Mapping[int, int]] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., preemptions: _Optional[int] = ..., finished: _Optional[_Mapping[int, int]] = ..., queue_time: _Optional[_Union[Distribution, _Mapping]] = ..., decode_step_time: _Optional[_Union[Distribution, _Mapping]] = ..., prefill_step_time: _Optional[_Union[Distribution, _Mapping]] = ..., mixed_step_time: _Optional[_Union[Distribution, _Mapping]] = ..., cells_swapped_out: _Optional[int] = ..., cells_swapped_in: _Optional[int] = ..., streams_refused: _Optional[int] = ..., tokens_forced: _Optional[int] = ...) -> None: ...

class Distribution(_message.Message):
    __slots__ = ("bounds", "counts", "sums")
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    bounds: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sums: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, bounds: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., sums: _Optional[_Iterable[float]] = ...) -> None: ...
