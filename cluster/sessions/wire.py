"""Sessions as messages between gateways and the owner of the sessions (`protos/sessions.proto`)."""

from __future__ import annotations

from array import array
from typing import Final

from cluster.sessions.histories import Begun, SessionState, SessionView
from protos import sessions_pb2 as pb

_STATES: Final = {
    SessionState.IDLE: pb.SESSION_STATE_IDLE,
    SessionState.BUSY: pb.SESSION_STATE_BUSY,
    SessionState.FAILED: pb.SESSION_STATE_FAILED,
}
_STATES_READ: Final = {told: state for state, told in _STATES.items()}


def session_to_proto(session: SessionView) -> pb.Session:
    return pb.Session(
        id=session.id,
        created=session.created,
        state=_STATES[session.state],
        position=session.position,
        has_pending=session.has_pending,
    )


def session_from_proto(told: pb.Session) -> SessionView:
    return SessionView(told.id, told.created, _STATES_READ[told.state], told.position, told.has_pending)


def begun_to_proto(begun: Begun) -> pb.Begun:
    return pb.Begun(turn_id=begun.turn_id, history=begun.history)


def begun_from_proto(told: pb.Begun) -> Begun:
    return Begun(told.turn_id, array("I", told.history))
