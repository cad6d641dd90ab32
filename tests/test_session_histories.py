"""The state of sessions: histories as a naive model has them, leases that pass, and what is forgotten."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.sessions.histories import SessionLimits, Sessions, SessionState
from planner.errors import SessionBusy, UnknownSession
from tests.fakes import FakeExecutor, fake_info, fake_limits, fake_request
from tests.session_rig import LIMITS
from tests.turns import Turns


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_idle_session_is_forgotten_and_a_busy_one_is_not() -> None:
    clock = Clock()
    sessions = Sessions(SessionLimits(9, 9, idle_s=60.0, lease_s=100.0), clock)
    old, busy, used = (sessions.open("").id for _ in range(3))
    begun = sessions.begin(busy, "", [1], 4, 64)
    clock.now += 40
    assert sessions.end(sessions.begin(used, "", [2], 4, 64).turn_id, [3], failed=False)
    clock.now += 40
    assert [one.id for one in sessions.of("")] == [busy, used]
    with pytest.raises(UnknownSession, match="session is not open"):
        sessions.get(old, "")
    assert sessions.end(begun.turn_id, [3], failed=False)
    clock.now += 30
    assert [one.id for one in sessions.of("")] == [busy]
    clock.now += 60
    assert len(sessions) == 1
    assert sessions.of("") == []
    assert len(sessions) == 0


def test_a_generation_that_nobody_renews_loses_its_session_to_the_next_one() -> None:
    clock = Clock()
    sessions = Sessions(SessionLimits(9, 9, idle_s=600.0, lease_s=10.0), clock)
    session = sessions.open("").id
    dead = sessions.begin(session, "", [1, 2], 4, 64)
    clock.now += 9
    with pytest.raises(SessionBusy):
        sessions.begin(session, "", [1], 4, 64)
    assert sessions.renew([dead.turn_id]) == []
    clock.now += 9
    assert sessions.get(session, "").state is SessionState.BUSY
    clock.now += 2
    assert sessions.get(session, "").state is SessionState.IDLE
    assert sessions.get(session, "").is_empty
    following = sessions.begin(session, "", [5], 4, 64)
    assert sessions.renew([dead.turn_id, following.turn_id]) == [dead.turn_id]
    assert not sessions.end(dead.turn_id, [9], failed=True)
    assert sessions.end(following.turn_id, [6], failed=False)
    assert sessions.begin(session, "", [7], 4, 64).history.tolist() == [5, 6]


def test_a_generation_that_is_late_still_counts_where_nobody_took_its_session() -> None:
    clock = Clock()
    sessions = Sessions(SessionLimits(9, 9, idle_s=600.0, lease_s=10.0), clock)
    session = sessions.open("").id
    late = sessions.begin(session, "", [1, 2], 4, 64)
    clock.now += 30
    assert sessions.end(late.turn_id, [3], failed=False)
    assert (sessions.get(session, "").position, sessions.get(session, "").has_pending) == (2, True)


def test_an_end_that_is_told_twice_counts_once() -> None:
    sessions = Sessions(LIMITS)
    session = sessions.open("").id
    turn = sessions.begin(session, "", [1, 2], 4, 64)
    for _ in range(2):
        assert sessions.end(turn.turn_id, [3], failed=False)
        assert sessions.get(session, "").position == 2
        assert sessions.renew([turn.turn_id]) == []
    following = sessions.begin(session, "", [4], 4, 64)
    assert not sessions.end(turn.turn_id, [3], failed=False)
    assert following.history.tolist() == [1, 2, 3]


def test_a_tree_of_forks_takes_the_cells_of_its_distinct_tokens() -> None:
    info = fake_info(num_cells=8192, max_prefill_tokens=512)
    turns = Turns(fake_limits(info, max_batched_tokens=512, prefill_chunk_tokens=512), FakeExecutor(info))
    sessions = Sessions(LIMITS)

    def generate(session: str, delta: list[int]) -> tuple[int, ...]:
        """All that the session holds then, without its pending token."""
        begun = sessions.begin(session, "", delta, 3, info.context)
        history = [*begun.history, *delta]
        ((said,),) = turns.answer([fake_request(history, 3)])
        sessions.end(begun.turn_id, said, failed=False)
        return (*history, *said[:-1])

    root = sessions.open("").id
    held = [generate(root, list(range(1, 101)))]
    level = [root]
    for depth in range(4):
        level = [sessions.fork(parent, "", None).id for parent in level for _ in range(3)]
        held += [generate(child, [200 + 50 * depth + place]) for place, child in enumerate(level)]
    distinct = {tokens[: end + 1] for tokens in held for end in range(len(tokens))}
    assert turns.planner.snapshot().owned_cells == 0
    assert len(distinct) <= turns.planner.snapshot().cached_cells + len(held)
    assert turns.planner.snapshot().cached_cells < 1.1 * len(distinct)


@settings(deadline=None)
@given(st.data())
def test_histories_are_as_a_naive_model_says(data: st.DataObject) -> None:
    sessions = Sessions(LIMITS)
    known: dict[str, tuple[list[int], bool]] = {}
    tokens = st.lists(st.integers(0, 9), min_size=1, max_size=4)
    for _ in range(data.draw(st.integers(1, 12))):
        verb = data.draw(st.sampled_from(["open", "extend", "fork", "rewind", "close"])) if known else "open"
        if verb == "open":
            known[sessions.open("").id] = ([], False)
            continue
        chosen = list(known)[data.draw(st.integers(0, len(known) - 1))]
        history, pending = known[chosen]
        if verb == "extend":
            delta, said = data.draw(tokens), data.draw(st.lists(st.integers(0, 9), max_size=5))
            begun = sessions.begin(chosen, "", delta, 4, 10_000)
            assert begun.history.tolist() == history
            sessions.end(begun.turn_id, said, failed=False)
            if said:
                known[chosen] = ([*history, *delta, *said], True)
        elif verb == "fork":
            known[sessions.fork(chosen, "", None).id] = (list(history), pending)
        elif verb == "rewind":
            at = data.draw(st.integers(0, len(history) - pending))
            known[sessions.fork(chosen, "", at).id] = (history[:at], False)
        else:
            sessions.close(chosen, "")
            del known[chosen]
    told = {one.id: (one.position, one.has_pending) for one in sessions.of("")}
    assert told == {name: (len(history) - pending, pending) for name, (history, pending) in known.items()}
    for name, (history, _) in known.items():
        assert sessions.begin(name, "", [1], 4, 10_000).history.tolist() == history
