from protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_IDLE: _ClassVar[SessionState]
    SESSION_STATE_BUSY: _ClassVar[SessionState]
    SESSION_STATE_FAILED: _ClassVar[SessionState]
SESSION_STATE_IDLE: SessionState
SESSION_STATE_BUSY: SessionState
SESSION_STATE_FAILED: SessionState

class Question(_message.Message):
    __slots__ = ("account", "open", "get", "list", "fork", "close", "begin", "renew", "end")
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    account: str
    open: Open
    get: str
    list: List
    fork: Fork
    close: str
    begin: Begin
    renew: Renew
    end: End
    def __init__(self, account: _Optional[str] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., get: _Optional[str] = ..., list: _Optional[_Union[List, _Mapping]] = ..., fork: _Optional[_Union[Fork, _Mapping]] = ..., close: _Optional[str] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class List(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Fork(_message.Message):
    __slots__ = ("session_id", "at")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    at: int
    def __init__(self, session_id: _Optional[str] = ..., at: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("session_id", "delta", "max_tokens", "context")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    delta: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    context: int
    def __init__(self, session_id: _Optional[str] = ..., delta: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., context: _Optional[int] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("turn_ids",)
    TURN_IDS_FIELD_NUMBER: _ClassVar[int]
    turn_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, turn_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("turn_id", "generated", "failed")
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    turn_id: str
    generated: _containers.RepeatedScalarFieldContainer[int]
    failed: bool
    def __init__(self, turn_id: _Optional[str] = ..., generated: _Optional[_Iterable[int]] = ..., failed: _Optional[bool] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("refusal", "session", "sessions", "begun", "lost", "kept", "closed")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    refusal: _worker_pb2.Error
    session: Session
    sessions: Sessions
    begun: Begun
    lost: Lost
    kept: bool
    closed: Closed
    def __init__(self, refusal: _Optional[_Union[_worker_pb2.Error, _Mapping]] = ..., session: _Optional[_Union[Session, _Mapping]] = ..., sessions: _Optional[_Union[Sessions, _Mapping]] = ..., begun: _Optional[_Union[Begun, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., kept: _Optional[bool] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("id", "created", "state", "position", "has_pending")
    ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HAS_PENDING_FIELD_NUMBER: _ClassVar[int]
    id: str
    created: int
    state: SessionState
    position: int
    has_pending: bool
    def __init__(self, id: _Optional[str] = ..., created: _Optional[int] = ..., state: _Optional[_Union[SessionState, str]] = ..., position: _Optional[int] = ..., has_pending: _Optional[bool] = ...) -> None: ...

class Sessions(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ...) -> None: ...

class Begun(_message.Message):
    __slots__ = ("turn_id", "history")
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    turn_id: str
    history: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, turn_id: _Optional[str] = ..., history: _Optional[_Iterable[int]] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("turn_ids",)
    TURN_IDS_FIELD_NUMBER: _ClassVar[int]
    turn_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, turn_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
