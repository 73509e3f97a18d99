from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]
    ROLE_ENCODE: _ClassVar[Role]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_MIXED: Role
ROLE_ENCODE: Role
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState

class WorkerIdentity(_message.Message):
    __slots__ = ("worker_id", "role", "address", "host", "model", "model_fingerprint", "vllm_version", "capacity", "epoch", "name", "metrics_address", "gang")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GANG_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: Role
    address: str
    host: str
    model: str
    model_fingerprint: str
    vllm_version: str
    capacity: Capacity
    epoch: int
    name: str
    metrics_address: str
    gang: Gang
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., address: _Optional[str] = ..., host: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., vllm_version: _Optional[str] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ..., epoch: _Optional[int] = ..., name: _Optional[str] = ..., metrics_address: _Optional[str] = ..., gang: _Optional[_Union[Gang, _Mapping]] = ...) -> None: ...

class Gang(_message.Message):
    __slots__ = ("name", "rank", "size", "life")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    size: int
    life: str
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., life: _Optional[str] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("id", "kind", "host", "metrics_address", "workers")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: str
    host: str
    metrics_address: str
    workers: int
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[str] = ..., host: _Optional[str] = ..., metrics_address: _Optional[str] = ..., workers: _Optional[int] = ...) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("compatibility_hash", "block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "lookahead_tokens", "transports", "speculative_method", "facts", "hashing", "adapters", "steps")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class AdaptersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    COMPATIBILITY_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_METHOD_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    HASHING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    compatibility_hash: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    lookahead_tokens: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    speculative_method: str
    facts: _containers.ScalarMap[str, str]
    hashing: BlockHashing
    adapters: _containers.ScalarMap[str, str]
    steps: StepLimits
    def __init__(self, compatibility_hash: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., lookahead_tokens: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., speculative_method: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ..., hashing: _Optional[_Union[BlockHashing, _Mapping]] = ..., adapters: _Optional[_Mapping[str, str]] = ..., steps: _Optional[_Union[StepLimits, _Mapping]] = ...) -> None: ...

class StepLimits(_message.Message):
    __slots__ = ("vocabulary", "runner_v2", "drafts_always", "prompt_logprobs")
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    RUNNER_V2_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_ALWAYS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    vocabulary: int
    runner_v2: bool
    drafts_always: bool
    prompt_logprobs: bool
    def __init__(self, vocabulary: _Optional[int] = ..., runner_v2: _Optional[bool] = ..., drafts_always: _Optional[bool] = ..., prompt_logprobs: _Optional[bool] = ...) -> None: ...

class BlockHashing(_message.Message):
    __slots__ = ("tokens", "algorithm", "root", "every")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    algorithm: str
    root: bytes
    every: int
    def __init__(self, tokens: _Optional[int] = ..., algorithm: _Optional[str] = ..., root: _Optional[bytes] = ..., every: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running", "waiting", "free_blocks", "pinned_handoffs", "pinned_bytes", "drafting", "deferred", "counts", "staging_bytes", "dummy_steps", "embeddings")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    DUMMY_STEPS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    free_blocks: int
    pinned_handoffs: int
    pinned_bytes: int
    drafting: Drafting
    deferred: int
    counts: EngineCounts
    staging_bytes: int
    dummy_steps: int
    embeddings: Embeddings
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., pinned_handoffs: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., drafting: _Optional[_Union[Drafting, _Mapping]] = ..., deferred: _Optional[int] = ..., counts: _Optional[_Union[EngineCounts, _Mapping]] = ..., staging_bytes: _Optional[int] = ..., dummy_steps: _Optional[int] = ..., embeddings: _Optional[_Union[Embeddings, _Mapping]] = ...) -> None: ...

class Embeddings(_message.Message):
    __slots__ = ("images", "bytes", "capacity", "computed", "found")
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    images: int
    bytes: int
    capacity: int
    computed: int
    found: int
    def __init__(self, images: _Optional[int] = ..., bytes: _Optional[int] = ..., capacity: _Optional[int] = ..., computed: _Optional[int] = ..., found: _Optional[int] = ...) -> None: ...

class EngineCounts(_message.Message):
    __slots__ = ("prefix_queries", "prefix_hits", "external_queries", "external_hits", "drafts", "drafted_tokens", "accepted_by_position", "computed_tokens", "output_tokens", "busy_s", "request_s")
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_QUERIES_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_HITS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_S_FIELD_NUMBER: _ClassVar[int]
    prefix_queries: int
    prefix_hits: int
    external_queries: int
    external_hits: int
    drafts: int
    drafted_tokens: int
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    computed_tokens: int
    output_tokens: int
    busy_s: float
    request_s: float
    def __init__(self, prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., external_queries: _Optional[int] = ..., external_hits: _Optional[int] = ..., drafts: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_by_position: _Optional[_Iterable[int]] = ..., computed_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., busy_s: _Optional[float] = ..., request_s: _Optional[float] = ...) -> None: ...

class Drafting(_message.Message):
    __slots__ = ("draft_length", "drafts", "first_acceptance", "mean_accepted_length", "learned_reference", "alarm")
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LEARNED_REFERENCE_FIELD_NUMBER: _ClassVar[int]
    ALARM_FIELD_NUMBER: _ClassVar[int]
    draft_length: int
    drafts: int
    first_acceptance: float
    mean_accepted_length: float
    learned_reference: float
    alarm: bool
    def __init__(self, draft_length: _Optional[int] = ..., drafts: _Optional[int] = ..., first_acceptance: _Optional[float] = ..., mean_accepted_length: _Optional[float] = ..., learned_reference: _Optional[float] = ..., alarm: _Optional[bool] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("identity", "state")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    identity: WorkerIdentity
    state: WorkerState
    def __init__(self, identity: _Optional[_Union[WorkerIdentity, _Mapping]] = ..., state: _Optional[_Union[WorkerState, str]] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("refusal", "heartbeat_s", "lease_s", "epoch")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    heartbeat_s: float
    lease_s: float
    epoch: int
    def __init__(self, refusal: _Optional[str] = ..., heartbeat_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., epoch: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker_id", "state", "load", "epoch", "blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: WorkerState
    load: WorkerLoad
    epoch: int
    blocks: BlockOperations
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., epoch: _Optional[int] = ..., blocks: _Optional[_Union[BlockOperations, _Mapping]] = ...) -> None: ...

class BlockOperations(_message.Message):
    __slots__ = ("instance", "first", "operations")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    instance: int
    first: int
    operations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, instance: _Optional[int] = ..., first: _Optional[int] = ..., operations: _Optional[_Iterable[int]] = ...) -> None: ...

class BlocksKnown(_message.Message):
    __slots__ = ("instance", "operations")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    instance: int
    operations: int
    def __init__(self, instance: _Optional[int] = ..., operations: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("known", "drain", "peer_reference", "log_level", "clock_s", "blocks")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    PEER_REFERENCE_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    known: bool
    drain: bool
    peer_reference: float
    log_level: str
    clock_s: float
    blocks: BlocksKnown
    def __init__(self, known: _Optional[bool] = ..., drain: _Optional[bool] = ..., peer_reference: _Optional[float] = ..., log_level: _Optional[str] = ..., clock_s: _Optional[float] = ..., blocks: _Optional[_Union[BlocksKnown, _Mapping]] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("worker_id", "epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class DeregisterReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Need(_message.Message):
    __slots__ = ("request_id", "router_id", "epoch", "prompt_tokens", "max_new_tokens", "exclude", "vllm_version", "model_fingerprint", "waited_s", "prefix_keys", "key_tokens", "priority", "room", "adapter", "encode")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    PREFIX_KEYS_FIELD_NUMBER: _ClassVar[int]
    KEY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    router_id: str
    epoch: int
    prompt_tokens: int
    max_new_tokens: int
    exclude: _containers.RepeatedScalarFieldContainer[str]
    vllm_version: str
    model_fingerprint: str
    waited_s: float
    prefix_keys: _containers.RepeatedScalarFieldContainer[int]
    key_tokens: int
    priority: int
    room: float
    adapter: Adapter
    encode: bool
    def __init__(self, request_id: _Optional[str] = ..., router_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., exclude: _Optional[_Iterable[str]] = ..., vllm_version: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., waited_s: _Optional[float] = ..., prefix_keys: _Optional[_Iterable[int]] = ..., key_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., room: _Optional[float] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., encode: _Optional[bool] = ...) -> None: ...

class Turns(_message.Message):
    __slots__ = ("heads",)
    HEADS_FIELD_NUMBER: _ClassVar[int]
    heads: _containers.RepeatedCompositeFieldContainer[Need]
    def __init__(self, heads: _Optional[_Iterable[_Union[Need, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("request_id", "epoch", "prefill", "decode", "lease_s", "blocks", "waits", "prompt_tokens", "source", "source_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    prefill: Worker
    decode: Worker
    lease_s: float
    blocks: int
    waits: bool
    prompt_tokens: int
    source: Worker
    source_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prefill: _Optional[_Union[Worker, _Mapping]] = ..., decode: _Optional[_Union[Worker, _Mapping]] = ..., lease_s: _Optional[float] = ..., blocks: _Optional[int] = ..., waits: _Optional[bool] = ..., prompt_tokens: _Optional[int] = ..., source: _Optional[_Union[Worker, _Mapping]] = ..., source_tokens: _Optional[int] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "address", "role", "model_fingerprint")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    role: Role
    model_fingerprint: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class Rejection(_message.Message):
    __slots__ = ("code", "message", "retry_after_s", "settling")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[Rejection.Code]
        CODE_NO_WORKERS: _ClassVar[Rejection.Code]
        CODE_FULL: _ClassVar[Rejection.Code]
        CODE_TOO_LARGE: _ClassVar[Rejection.Code]
        CODE_STALE_EPOCH: _ClassVar[Rejection.Code]
    CODE_UNSPECIFIED: Rejection.Code
    CODE_NO_WORKERS: Rejection.Code
    CODE_FULL: Rejection.Code
    CODE_TOO_LARGE: Rejection.Code
    CODE_STALE_EPOCH: Rejection.Code
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    SETTLING_FIELD_NUMBER: _ClassVar[int]
    code: Rejection.Code
    message: str
    retry_after_s: float
    settling: bool
    def __init__(self, code: _Optional[_Union[Rejection.Code, str]] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., settling: _Optional[bool] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("needs", "report")
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    needs: _containers.RepeatedCompositeFieldContainer[Need]
    report: ReportRequest
    def __init__(self, needs: _Optional[_Iterable[_Union[Need, _Mapping]]] = ..., report: _Optional[_Union[ReportRequest, _Mapping]] = ...) -> None: ...

class ExchangeReply(_message.Message):
    __slots__ = ("replies", "report")
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[PlaceReply]
    report: ReportReply
    def __init__(self, replies: _Optional[_Iterable[_Union[PlaceReply, _Mapping]]] = ..., report: _Optional[_Union[ReportReply, _Mapping]] = ...) -> None: ...

class PlaceReply(_message.Message):
    __slots__ = ("placement", "rejection", "refusal", "took_s")
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    REJECTION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    placement: Placement
    rejection: Rejection
    refusal: str
    took_s: float
    def __init__(self, placement: _Optional[_Union[Placement, _Mapping]] = ..., rejection: _Optional[_Union[Rejection, _Mapping]] = ..., refusal: _Optional[str] = ..., took_s: _Optional[float] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("router_id", "prefilled", "finished", "renewed", "placed", "shared")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    prefilled: _containers.RepeatedCompositeFieldContainer[Attempt]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    renewed: _containers.RepeatedCompositeFieldContainer[Attempt]
    placed: _containers.RepeatedCompositeFieldContainer[Booking]
    shared: _containers.RepeatedCompositeFieldContainer[Shared]
    def __init__(self, router_id: _Optional[str] = ..., prefilled: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., renewed: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., placed: _Optional[_Iterable[_Union[Booking, _Mapping]]] = ..., shared: _Optional[_Iterable[_Union[Shared, _Mapping]]] = ...) -> None: ...

class Shared(_message.Message):
    __slots__ = ("attempt", "blocks")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    blocks: int
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., blocks: _Optional[int] = ...) -> None: ...

class Booking(_message.Message):
    __slots__ = ("attempt", "prefill_worker_id", "decode_worker_id", "prompt_tokens", "blocks", "prefilled")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    prefill_worker_id: str
    decode_worker_id: str
    prompt_tokens: int
    blocks: int
    prefilled: bool
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., prefill_worker_id: _Optional[str] = ..., decode_worker_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., prefilled: _Optional[bool] = ...) -> None: ...

class Attempt(_message.Message):
    __slots__ = ("request_id", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("attempt", "outcome", "cost", "kept")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    outcome: str
    cost: Cost
    kept: int
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., outcome: _Optional[str] = ..., cost: _Optional[_Union[Cost, _Mapping]] = ..., kept: _Optional[int] = ...) -> None: ...

class Cost(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "handoff_ms", "decode_ms", "handoff_bytes", "transport", "prompt_tokens", "output_tokens", "drafted_tokens", "accepted_tokens", "draft_steps")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STEPS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    handoff_ms: float
    decode_ms: float
    handoff_bytes: int
    transport: str
    prompt_tokens: int
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    draft_steps: int
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., handoff_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., handoff_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., draft_steps: _Optional[int] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("lost", "fenced", "generation", "refusal", "wanted")
    LOST_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedCompositeFieldContainer[Attempt]
    fenced: _containers.RepeatedCompositeFieldContainer[Attempt]
    generation: str
    refusal: str
    wanted: bool
    def __init__(self, lost: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., fenced: _Optional[_Iterable[_Union[Attempt, _Mapping]]] = ..., generation: _Optional[str] = ..., refusal: _Optional[str] = ..., wanted: _Optional[bool] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("router_id", "load", "process", "feed", "revision")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    FEED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    load: RouterLoad
    process: Process
    feed: str
    revision: int
    def __init__(self, router_id: _Optional[str] = ..., load: _Optional[_Union[RouterLoad, _Mapping]] = ..., process: _Optional[_Union[Process, _Mapping]] = ..., feed: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class RouterLoad(_message.Message):
    __slots__ = ("prompts", "prompt_tokens", "first_token", "gap", "over", "output_tokens", "waiting", "images", "image_tokens")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    first_token: _containers.RepeatedScalarFieldContainer[int]
    gap: _containers.RepeatedScalarFieldContainer[int]
    over: int
    output_tokens: int
    waiting: int
    images: _containers.RepeatedScalarFieldContainer[int]
    image_tokens: int
    def __init__(self, prompts: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., first_token: _Optional[_Iterable[int]] = ..., gap: _Optional[_Iterable[int]] = ..., over: _Optional[int] = ..., output_tokens: _Optional[int] = ..., waiting: _Optional[int] = ..., images: _Optional[_Iterable[int]] = ..., image_tokens: _Optional[int] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("generation", "settling", "worker_lease_s", "placement_lease_s", "max_queued_prompt_tokens", "max_queue_factor", "handoff_min_tokens", "left", "idle_decode_tokens", "prefix_pull_s", "log_level", "fleet", "yours")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SETTLING_FIELD_NUMBER: _ClassVar[int]
    WORKER_LEASE_S_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_LEASE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FACTOR_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    IDLE_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_PULL_S_FIELD_NUMBER: _ClassVar[int]
    LOG_LEVEL_FIELD_NUMBER: _ClassVar[int]
    FLEET_FIELD_NUMBER: _ClassVar[int]
    YOURS_FIELD_NUMBER: _ClassVar[int]
    generation: str
    settling: bool
    worker_lease_s: float
    placement_lease_s: float
    max_queued_prompt_tokens: int
    max_queue_factor: float
    handoff_min_tokens: int
    left: _containers.RepeatedScalarFieldContainer[str]
    idle_decode_tokens: int
    prefix_pull_s: float
    log_level: str
    fleet: bytes
    yours: _containers.RepeatedCompositeFieldContainer[Booked]
    def __init__(self, generation: _Optional[str] = ..., settling: _Optional[bool] = ..., worker_lease_s: _Optional[float] = ..., placement_lease_s: _Optional[float] = ..., max_queued_prompt_tokens: _Optional[int] = ..., max_queue_factor: _Optional[float] = ..., handoff_min_tokens: _Optional[int] = ..., left: _Optional[_Iterable[str]] = ..., idle_decode_tokens: _Optional[int] = ..., prefix_pull_s: _Optional[float] = ..., log_level: _Optional[str] = ..., fleet: _Optional[bytes] = ..., yours: _Optional[_Iterable[_Union[Booked, _Mapping]]] = ...) -> None: ...

class FleetUpdate(_message.Message):
    __slots__ = ("feed", "revision", "whole", "gone", "workers", "processes")
    FEED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    feed: str
    revision: int
    whole: bool
    gone: _containers.RepeatedScalarFieldContainer[str]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    processes: Processes
    def __init__(self, feed: _Optional[str] = ..., revision: _Optional[int] = ..., whole: _Optional[bool] = ..., gone: _Optional[_Iterable[str]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., processes: _Optional[_Union[Processes, _Mapping]] = ...) -> None: ...

class Processes(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    def __init__(self, processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ...) -> None: ...

class Booked(_message.Message):
    __slots__ = ("worker_id", "prompt_tokens", "requests", "blocks", "decoding")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    prompt_tokens: int
    requests: int
    blocks: int
    decoding: int
    def __init__(self, worker_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., requests: _Optional[int] = ..., blocks: _Optional[int] = ..., decoding: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Description(_message.Message):
    __slots__ = ("topic", "store", "workers", "attempts", "handoffs", "store_problem", "drained", "routers", "processes", "schedulers")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    STORE_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    SCHEDULERS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    store: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    attempts: _containers.RepeatedCompositeFieldContainer[LiveAttempt]
    handoffs: _containers.RepeatedCompositeFieldContainer[PastHandoff]
    store_problem: str
    drained: _containers.RepeatedScalarFieldContainer[str]
    routers: _containers.RepeatedCompositeFieldContainer[RouterStatus]
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    schedulers: _containers.RepeatedCompositeFieldContainer[SchedulerStatus]
    def __init__(self, topic: _Optional[str] = ..., store: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., attempts: _Optional[_Iterable[_Union[LiveAttempt, _Mapping]]] = ..., handoffs: _Optional[_Iterable[_Union[PastHandoff, _Mapping]]] = ..., store_problem: _Optional[str] = ..., drained: _Optional[_Iterable[str]] = ..., routers: _Optional[_Iterable[_Union[RouterStatus, _Mapping]]] = ..., processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ..., schedulers: _Optional[_Iterable[_Union[SchedulerStatus, _Mapping]]] = ...) -> None: ...

class SchedulerStatus(_message.Message):
    __slots__ = ("address", "placements", "store_problem")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    STORE_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    address: str
    placements: int
    store_problem: str
    def __init__(self, address: _Optional[str] = ..., placements: _Optional[int] = ..., store_problem: _Optional[str] = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("router_id", "heard_age_s", "load")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    HEARD_AGE_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    heard_age_s: float
    load: RouterLoad
    def __init__(self, router_id: _Optional[str] = ..., heard_age_s: _Optional[float] = ..., load: _Optional[_Union[RouterLoad, _Mapping]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("identity", "state", "load", "heartbeat_age_s", "reserved_prompt_tokens", "reserved_requests", "reserved_blocks", "drained", "reserved_decoding")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    RESERVED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_DECODING_FIELD_NUMBER: _ClassVar[int]
    identity: WorkerIdentity
    state: WorkerState
    load: WorkerLoad
    heartbeat_age_s: float
    reserved_prompt_tokens: int
    reserved_requests: int
    reserved_blocks: int
    drained: bool
    reserved_decoding: int
    def __init__(self, identity: _Optional[_Union[WorkerIdentity, _Mapping]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., heartbeat_age_s: _Optional[float] = ..., reserved_prompt_tokens: _Optional[int] = ..., reserved_requests: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., drained: _Optional[bool] = ..., reserved_decoding: _Optional[int] = ...) -> None: ...

class LiveAttempt(_message.Message):
    __slots__ = ("attempt", "prefill_worker_id", "decode_worker_id", "prefilled", "lease_left_s")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    prefill_worker_id: str
    decode_worker_id: str
    prefilled: bool
    lease_left_s: float
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., prefill_worker_id: _Optional[str] = ..., decode_worker_id: _Optional[str] = ..., prefilled: _Optional[bool] = ..., lease_left_s: _Optional[float] = ...) -> None: ...

class PastHandoff(_message.Message):
    __slots__ = ("attempt", "prefill_worker_id", "decode_worker_id", "outcome", "cost", "age_s")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    attempt: Attempt
    prefill_worker_id: str
    decode_worker_id: str
    outcome: str
    cost: Cost
    age_s: float
    def __init__(self, attempt: _Optional[_Union[Attempt, _Mapping]] = ..., prefill_worker_id: _Optional[str] = ..., decode_worker_id: _Optional[str] = ..., outcome: _Optional[str] = ..., cost: _Optional[_Union[Cost, _Mapping]] = ..., age_s: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("worker_id", "problem")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    problem: str
    def __init__(self, worker_id: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class UndrainReply(_message.Message):
    __slots__ = ("name", "problem")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    problem: str
    def __init__(self, name: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("worker_id", "role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: Role
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class SetRoleReply(_message.Message):
    __slots__ = ("worker_id", "problem")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    problem: str
    def __init__(self, worker_id: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("name", "roles")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    name: str
    roles: _containers.RepeatedScalarFieldContainer[Role]
    def __init__(self, name: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ...) -> None: ...

class OrdersRequest(_message.Message):
    __slots__ = ("fleet_id", "places")
    FLEET_ID_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    fleet_id: str
    places: _containers.RepeatedCompositeFieldContainer[Place]
    def __init__(self, fleet_id: _Optional[str] = ..., places: _Optional[_Iterable[_Union[Place, _Mapping]]] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("name", "role")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: Role
    def __init__(self, name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ...) -> None: ...

class OrdersReply(_message.Message):
    __slots__ = ("fence", "orders")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    fence: int
    orders: _containers.RepeatedCompositeFieldContainer[Order]
    def __init__(self, fence: _Optional[int] = ..., orders: _Optional[_Iterable[_Union[Order, _Mapping]]] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("process", "level")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    process: str
    level: str
    def __init__(self, process: _Optional[str] = ..., level: _Optional[str] = ...) -> None: ...

class SetLogLevelReply(_message.Message):
    __slots__ = ("processes", "problem")
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedScalarFieldContainer[str]
    problem: str
    def __init__(self, processes: _Optional[_Iterable[str]] = ..., problem: _Optional[str] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("worker_id", "clock_alone")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ALONE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    clock_alone: bool
    def __init__(self, worker_id: _Optional[str] = ..., clock_alone: _Optional[bool] = ...) -> None: ...

class InspectReply(_message.Message):
    __slots__ = ("inspection", "problem", "clock_ahead_s", "asked_s")
    INSPECTION_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    CLOCK_AHEAD_S_FIELD_NUMBER: _ClassVar[int]
    ASKED_S_FIELD_NUMBER: _ClassVar[int]
    inspection: Inspection
    problem: str
    clock_ahead_s: float
    asked_s: float
    def __init__(self, inspection: _Optional[_Union[Inspection, _Mapping]] = ..., problem: _Optional[str] = ..., clock_ahead_s: _Optional[float] = ..., asked_s: _Optional[float] = ...) -> None: ...

class Inspection(_message.Message):
    __slots__ = ("unix_s", "versions", "machine", "kv_addresses")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    unix_s: float
    versions: _containers.ScalarMap[str, str]
    machine: Machine
    kv_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, unix_s: _Optional[float] = ..., versions: _Optional[_Mapping[str, str]] = ..., machine: _Optional[_Union[Machine, _Mapping]] = ..., kv_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class Machine(_message.Message):
    __slots__ = ("name", "shm_bytes", "shm_free", "shm_writable", "files_soft", "files_hard", "memory_bytes", "memory_free", "cores", "cpu", "cpu_features", "amx_permitted", "gpus")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHM_FREE_FIELD_NUMBER: _ClassVar[int]
    SHM_WRITABLE_FIELD_NUMBER: _ClassVar[int]
    FILES_SOFT_FIELD_NUMBER: _ClassVar[int]
    FILES_HARD_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FREE_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    CPU_FEATURES_FIELD_NUMBER: _ClassVar[int]
    AMX_PERMITTED_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    name: str
    shm_bytes: int
    shm_free: int
    shm_writable: bool
    files_soft: int
    files_hard: int
    memory_bytes: int
    memory_free: int
    cores: int
    cpu: str
    cpu_features: _containers.RepeatedScalarFieldContainer[str]
    amx_permitted: bool
    gpus: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., shm_bytes: _Optional[int] = ..., shm_free: _Optional[int] = ..., shm_writable: _Optional[bool] = ..., files_soft: _Optional[int] = ..., files_hard: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., memory_free: _Optional[int] = ..., cores: _Optional[int] = ..., cpu: _Optional[str] = ..., cpu_features: _Optional[_Iterable[str]] = ..., amx_permitted: _Optional[bool] = ..., gpus: _Optional[_Iterable[str]] = ...) -> None: ...

class TryHandoffRequest(_message.Message):
    __slots__ = ("from_worker_id", "to_worker_id", "transport", "bytes")
    FROM_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TO_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    from_worker_id: str
    to_worker_id: str
    transport: str
    bytes: int
    def __init__(self, from_worker_id: _Optional[str] = ..., to_worker_id: _Optional[str] = ..., transport: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class TryHandoffReply(_message.Message):
    __slots__ = ("bytes", "seconds", "problem")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    seconds: float
    problem: str
    def __init__(self, bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., problem: _Optional[str] = ...) -> None: ...

class FindLeaderRequest(_message.Message):
    __slots__ = ("gang",)
    GANG_FIELD_NUMBER: _ClassVar[int]
    gang: str
    def __init__(self, gang: _Optional[str] = ...) -> None: ...

class FindLeaderReply(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...
