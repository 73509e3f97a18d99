from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_SERVING: _ClassVar[Stage]
    STAGE_DRAINING: _ClassVar[Stage]
    STAGE_DRAINED: _ClassVar[Stage]
STAGE_SERVING: Stage
STAGE_DRAINING: Stage
STAGE_DRAINED: Stage

class FromMember(_message.Message):
    __slots__ = ("join", "ring", "stage")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    join: Join
    ring: int
    stage: Stage
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., ring: _Optional[int] = ..., stage: _Optional[_Union[Stage, str]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("worker_id", "gang", "rank", "size", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GANG_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    gang: str
    rank: int
    size: int
    facts: _containers.ScalarMap[str, str]
    def __init__(self, worker_id: _Optional[str] = ..., gang: _Optional[str] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class FromLeader(_message.Message):
    __slots__ = ("world", "ring", "stage")
    WORLD_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    world: World
    ring: int
    stage: Stage
    def __init__(self, world: _Optional[_Union[World, _Mapping]] = ..., ring: _Optional[int] = ..., stage: _Optional[_Union[Stage, str]] = ...) -> None: ...

class World(_message.Message):
    __slots__ = ("life", "host", "store_port")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    life: str
    host: str
    store_port: int
    def __init__(self, life: _Optional[str] = ..., host: _Optional[str] = ..., store_port: _Optional[int] = ...) -> None: ...
