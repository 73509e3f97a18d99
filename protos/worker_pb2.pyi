from baton.protos import handoff_pb2 as _handoff_pb2
from baton.protos import scheduler_pb2 as _scheduler_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_PREFILL: _ClassVar[Phase]
    PHASE_DECODE: _ClassVar[Phase]
    PHASE_SAVE: _ClassVar[Phase]
    PHASE_ENCODE: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
PHASE_PREFILL: Phase
PHASE_DECODE: Phase
PHASE_SAVE: Phase
PHASE_ENCODE: Phase

class HelloRequest(_message.Message):
    __slots__ = ("router_id", "vllm_version", "model", "protocol")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    vllm_version: str
    model: str
    protocol: int
    def __init__(self, router_id: _Optional[str] = ..., vllm_version: _Optional[str] = ..., model: _Optional[str] = ..., protocol: _Optional[int] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("refusal", "identity", "protocol")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    identity: _scheduler_pb2.WorkerIdentity
    protocol: int
    def __init__(self, refusal: _Optional[str] = ..., identity: _Optional[_Union[_scheduler_pb2.WorkerIdentity, _Mapping]] = ..., protocol: _Optional[int] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("worker_id", "address", "request_id", "key", "tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    request_id: str
    key: bytes
    tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., request_id: _Optional[str] = ..., key: _Optional[bytes] = ..., tokens: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("request_id", "epoch", "phase", "engine_request", "output_token_ids", "traceparent", "prefix_tokens", "service", "alone_tokens", "more_alone", "party", "prompt_tokens", "blocks", "source", "key", "left_s", "encoded")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    ALONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MORE_ALONE_FIELD_NUMBER: _ClassVar[int]
    PARTY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    phase: Phase
    engine_request: bytes
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    traceparent: str
    prefix_tokens: int
    service: ServiceClass
    alone_tokens: int
    more_alone: bool
    party: int
    prompt_tokens: int
    blocks: int
    source: Source
    key: bytes
    left_s: float
    encoded: _containers.RepeatedCompositeFieldContainer[Encoded]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., phase: _Optional[_Union[Phase, str]] = ..., engine_request: _Optional[bytes] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., traceparent: _Optional[str] = ..., prefix_tokens: _Optional[int] = ..., service: _Optional[_Union[ServiceClass, _Mapping]] = ..., alone_tokens: _Optional[int] = ..., more_alone: _Optional[bool] = ..., party: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., blocks: _Optional[int] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., key: _Optional[bytes] = ..., left_s: _Optional[float] = ..., encoded: _Optional[_Iterable[_Union[Encoded, _Mapping]]] = ...) -> None: ...

class Encoded(_message.Message):
    __slots__ = ("identifier", "source")
    IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    identifier: str
    source: Source
    def __init__(self, identifier: _Optional[str] = ..., source: _Optional[_Union[Source, _Mapping]] = ...) -> None: ...

class ServiceClass(_message.Message):
    __slots__ = ("priority", "patience_ms", "share", "itl_s", "preemptible", "ttft_s")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_MS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIBLE_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    priority: int
    patience_ms: int
    share: float
    itl_s: float
    preemptible: bool
    ttft_s: float
    def __init__(self, priority: _Optional[int] = ..., patience_ms: _Optional[int] = ..., share: _Optional[float] = ..., itl_s: _Optional[float] = ..., preemptible: _Optional[bool] = ..., ttft_s: _Optional[float] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Media(_message.Message):
    __slots__ = ("identifier", "part", "last", "digest")
    IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    identifier: str
    part: bytes
    last: bool
    digest: int
    def __init__(self, identifier: _Optional[str] = ..., part: _Optional[bytes] = ..., last: _Optional[bool] = ..., digest: _Optional[int] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("start", "abort", "media")
    START_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    start: Start
    abort: Abort
    media: Media
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., media: _Optional[_Union[Media, _Mapping]] = ...) -> None: ...

class RunReply(_message.Message):
    __slots__ = ("engine_outputs", "saved", "admitted", "failed", "shared")
    ENGINE_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    engine_outputs: bytes
    saved: _containers.RepeatedCompositeFieldContainer[Saved]
    admitted: _containers.RepeatedCompositeFieldContainer[Admitted]
    failed: _containers.RepeatedCompositeFieldContainer[Failed]
    shared: _containers.RepeatedCompositeFieldContainer[Shared]
    def __init__(self, engine_outputs: _Optional[bytes] = ..., saved: _Optional[_Iterable[_Union[Saved, _Mapping]]] = ..., admitted: _Optional[_Iterable[_Union[Admitted, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[Failed, _Mapping]]] = ..., shared: _Optional[_Iterable[_Union[Shared, _Mapping]]] = ...) -> None: ...

class Shared(_message.Message):
    __slots__ = ("request_id", "epoch", "blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    blocks: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("request_id", "epoch", "problem", "saved_at_s", "save_ms", "chunks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SAVED_AT_S_FIELD_NUMBER: _ClassVar[int]
    SAVE_MS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    problem: str
    saved_at_s: float
    save_ms: float
    chunks: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., problem: _Optional[str] = ..., saved_at_s: _Optional[float] = ..., save_ms: _Optional[float] = ..., chunks: _Optional[int] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("request_id", "epoch", "transport", "bytes", "blocks_pulled", "wait_ms", "move_ms", "check_ms", "load_ms", "total_ms", "early_bytes", "tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PULLED_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    MOVE_MS_FIELD_NUMBER: _ClassVar[int]
    CHECK_MS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    EARLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    transport: str
    bytes: int
    blocks_pulled: int
    wait_ms: float
    move_ms: float
    check_ms: float
    load_ms: float
    total_ms: float
    early_bytes: int
    tokens: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., transport: _Optional[str] = ..., bytes: _Optional[int] = ..., blocks_pulled: _Optional[int] = ..., wait_ms: _Optional[float] = ..., move_ms: _Optional[float] = ..., check_ms: _Optional[float] = ..., load_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., early_bytes: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request_id", "epoch", "code", "message", "engine_goes_on", "images")
    class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CODE_UNSPECIFIED: _ClassVar[Failed.Code]
        CODE_HANDOFF: _ClassVar[Failed.Code]
        CODE_DRAINING: _ClassVar[Failed.Code]
        CODE_FULL: _ClassVar[Failed.Code]
        CODE_INVALID: _ClassVar[Failed.Code]
        CODE_STALE: _ClassVar[Failed.Code]
        CODE_ENGINE: _ClassVar[Failed.Code]
        CODE_SOURCE: _ClassVar[Failed.Code]
        CODE_STAGING: _ClassVar[Failed.Code]
        CODE_MEDIA: _ClassVar[Failed.Code]
    CODE_UNSPECIFIED: Failed.Code
    CODE_HANDOFF: Failed.Code
    CODE_DRAINING: Failed.Code
    CODE_FULL: Failed.Code
    CODE_INVALID: Failed.Code
    CODE_STALE: Failed.Code
    CODE_ENGINE: Failed.Code
    CODE_SOURCE: Failed.Code
    CODE_STAGING: Failed.Code
    CODE_MEDIA: Failed.Code
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_GOES_ON_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    code: Failed.Code
    message: str
    engine_goes_on: bool
    images: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., code: _Optional[_Union[Failed.Code, str]] = ..., message: _Optional[str] = ..., engine_goes_on: _Optional[bool] = ..., images: _Optional[_Iterable[str]] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "key")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    key: bytes
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., key: _Optional[bytes] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("begun", "complete", "problem")
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    begun: _handoff_pb2.Manifest
    complete: Complete
    problem: Problem
    def __init__(self, begun: _Optional[_Union[_handoff_pb2.Manifest, _Mapping]] = ..., complete: _Optional[_Union[Complete, _Mapping]] = ..., problem: _Optional[_Union[Problem, _Mapping]] = ...) -> None: ...

class Complete(_message.Message):
    __slots__ = ("manifest", "token_ids", "draft_token_ids", "embedding")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    manifest: _handoff_pb2.Manifest
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    embedding: _handoff_pb2.EmbeddingManifest
    def __init__(self, manifest: _Optional[_Union[_handoff_pb2.Manifest, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., embedding: _Optional[_Union[_handoff_pb2.EmbeddingManifest, _Mapping]] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("name", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role", "fence")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    role: _scheduler_pb2.Role
    fence: int
    def __init__(self, role: _Optional[_Union[_scheduler_pb2.Role, str]] = ..., fence: _Optional[int] = ...) -> None: ...

class SetRoleReply(_message.Message):
    __slots__ = ("refusal",)
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    def __init__(self, refusal: _Optional[str] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("clock_alone",)
    CLOCK_ALONE_FIELD_NUMBER: _ClassVar[int]
    clock_alone: bool
    def __init__(self, clock_alone: _Optional[bool] = ...) -> None: ...

class TryHandoffRequest(_message.Message):
    __slots__ = ("sources", "transport", "bytes")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedScalarFieldContainer[str]
    transport: str
    bytes: int
    def __init__(self, sources: _Optional[_Iterable[str]] = ..., transport: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...
