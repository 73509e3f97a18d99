from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Manifest(_message.Message):
    __slots__ = ("request_id", "epoch", "worker_id", "compatibility_hash", "num_tokens", "num_blocks", "shards", "lease_s", "saved_at_s", "save_ms", "digest", "host", "chunks", "groups", "wire_dtype")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    SAVED_AT_S_FIELD_NUMBER: _ClassVar[int]
    SAVE_MS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    worker_id: str
    compatibility_hash: str
    num_tokens: int
    num_blocks: int
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    lease_s: float
    saved_at_s: float
    save_ms: float
    digest: int
    host: str
    chunks: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    wire_dtype: str
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., worker_id: _Optional[str] = ..., compatibility_hash: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., lease_s: _Optional[float] = ..., saved_at_s: _Optional[float] = ..., save_ms: _Optional[float] = ..., digest: _Optional[int] = ..., host: _Optional[str] = ..., chunks: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., wire_dtype: _Optional[str] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("block_size", "first_block", "num_blocks")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    first_block: int
    num_blocks: int
    def __init__(self, block_size: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class EmbeddingManifest(_message.Message):
    __slots__ = ("identifier", "worker_id", "compatibility_hash", "rows", "width", "dtype", "request_id", "epoch", "num_records", "shard", "lease_s", "digest")
    IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_HASH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_RECORDS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    identifier: str
    worker_id: str
    compatibility_hash: str
    rows: int
    width: int
    dtype: str
    request_id: str
    epoch: int
    num_records: int
    shard: Shard
    lease_s: float
    digest: int
    def __init__(self, identifier: _Optional[str] = ..., worker_id: _Optional[str] = ..., compatibility_hash: _Optional[str] = ..., rows: _Optional[int] = ..., width: _Optional[int] = ..., dtype: _Optional[str] = ..., request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., num_records: _Optional[int] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ..., lease_s: _Optional[float] = ..., digest: _Optional[int] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("rank", "address", "record_bytes", "offers", "ticket", "layers", "slots")
    class OffersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    address: str
    record_bytes: int
    offers: _containers.ScalarMap[str, bytes]
    ticket: bytes
    layers: _containers.RepeatedScalarFieldContainer[int]
    slots: int
    def __init__(self, rank: _Optional[int] = ..., address: _Optional[str] = ..., record_bytes: _Optional[int] = ..., offers: _Optional[_Mapping[str, bytes]] = ..., ticket: _Optional[bytes] = ..., layers: _Optional[_Iterable[int]] = ..., slots: _Optional[int] = ...) -> None: ...

class SharedMemoryOffer(_message.Message):
    __slots__ = ("host", "segment", "offset", "runs")
    HOST_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    host: str
    segment: str
    offset: int
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    def __init__(self, host: _Optional[str] = ..., segment: _Optional[str] = ..., offset: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ...) -> None: ...

class NixlOffer(_message.Message):
    __slots__ = ("agent", "address", "offset", "runs", "regions")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    agent: str
    address: int
    offset: int
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    regions: _containers.RepeatedCompositeFieldContainer[NixlRegion]
    def __init__(self, agent: _Optional[str] = ..., address: _Optional[int] = ..., offset: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ..., regions: _Optional[_Iterable[_Union[NixlRegion, _Mapping]]] = ...) -> None: ...

class NixlRegion(_message.Message):
    __slots__ = ("number", "metadata")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    number: int
    metadata: bytes
    def __init__(self, number: _Optional[int] = ..., metadata: _Optional[bytes] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConnectReply(_message.Message):
    __slots__ = ("port", "session", "here_key", "there_key")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HERE_KEY_FIELD_NUMBER: _ClassVar[int]
    THERE_KEY_FIELD_NUMBER: _ClassVar[int]
    port: int
    session: bytes
    here_key: bytes
    there_key: bytes
    def __init__(self, port: _Optional[int] = ..., session: _Optional[bytes] = ..., here_key: _Optional[bytes] = ..., there_key: _Optional[bytes] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "rank", "first_block", "num_blocks", "ticket", "at_once")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    rank: int
    first_block: int
    num_blocks: int
    ticket: bytes
    at_once: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., ticket: _Optional[bytes] = ..., at_once: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "confirmed", "ticket", "reader", "readers")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    confirmed: bool
    ticket: bytes
    reader: int
    readers: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., confirmed: _Optional[bool] = ..., ticket: _Optional[bytes] = ..., reader: _Optional[int] = ..., readers: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: bool
    def __init__(self, held: _Optional[bool] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("request_id", "epoch", "ticket")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    ticket: bytes
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("handoffs",)
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    handoffs: _containers.RepeatedCompositeFieldContainer[Held]
    def __init__(self, handoffs: _Optional[_Iterable[_Union[Held, _Mapping]]] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("gone",)
    GONE_FIELD_NUMBER: _ClassVar[int]
    gone: _containers.RepeatedCompositeFieldContainer[Held]
    def __init__(self, gone: _Optional[_Iterable[_Union[Held, _Mapping]]] = ...) -> None: ...

class TakenRequest(_message.Message):
    __slots__ = ("request_id", "epoch", "ticket", "taken", "wanted", "reader", "readers")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    ticket: bytes
    taken: int
    wanted: int
    reader: int
    readers: int
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., ticket: _Optional[bytes] = ..., taken: _Optional[int] = ..., wanted: _Optional[int] = ..., reader: _Optional[int] = ..., readers: _Optional[int] = ...) -> None: ...

class TakenReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StagedRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StagedReply(_message.Message):
    __slots__ = ("handoffs", "bytes", "capacity", "overdue_s")
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    OVERDUE_S_FIELD_NUMBER: _ClassVar[int]
    handoffs: int
    bytes: int
    capacity: int
    overdue_s: float
    def __init__(self, handoffs: _Optional[int] = ..., bytes: _Optional[int] = ..., capacity: _Optional[int] = ..., overdue_s: _Optional[float] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class SampleReply(_message.Message):
    __slots__ = ("request_id", "shard", "num_blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    shard: Shard
    num_blocks: int
    def __init__(self, request_id: _Optional[str] = ..., shard: _Optional[_Union[Shard, _Mapping]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class TrialRequest(_message.Message):
    __slots__ = ("source", "transport", "bytes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    source: str
    transport: str
    bytes: int
    def __init__(self, source: _Optional[str] = ..., transport: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class TrialReply(_message.Message):
    __slots__ = ("bytes", "seconds", "problem")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    seconds: float
    problem: str
    def __init__(self, bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., problem: _Optional[str] = ...) -> None: ...
