"""Asks every worker for its view over Serve's control plane, for `/debug/kv` and `/debug/plan`. Not for tokens, and not
for what gateways know already: it is slow, and every worker looks through its pool."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Collection
from typing import Any, Final, Protocol

from ray.exceptions import RayError

from cluster.web.debug_views import RollCall
from planner.errors import Unavailable

ANSWER_WITHIN_S: Final = 8.0


class Broadcast(Protocol):
    """What is used of Serve's answer to a call of all replicas."""

    def results(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]: ...


class RollCaller:
    """Owner: a gateway's event loop. `broadcast(num_steps)` asks all workers; `expected()` names those there are.

    One call at a time, and whoever asks for the same meanwhile shares its answer: clients may come in any number.
    """

    def __init__(self, broadcast: Callable[[int], Broadcast], expected: Callable[[], Collection[str]]) -> None:
        self._broadcast = broadcast
        self._expected = expected
        self._turn = asyncio.Lock()
        self._asked: dict[int, asyncio.Task[RollCall]] = {}  # by the number of steps

    async def call(self, num_steps: int) -> RollCall:
        """Raises `Unavailable` where Serve does not even reach them."""
        if (task := self._asked.get(num_steps)) is None:
            # In a context of its own: in its first asker's it would end when that one's client leaves.
            task = asyncio.create_task(self._call(num_steps), context=contextvars.Context())
            self._asked[num_steps] = task
            task.add_done_callback(lambda done: self._forget(num_steps, done))
        return await asyncio.shield(task)

    def _forget(self, num_steps: int, done: asyncio.Task[RollCall]) -> None:
        del self._asked[num_steps]
        if not done.cancelled():
            done.exception()  # has been told to whoever still waits

    async def _call(self, num_steps: int) -> RollCall:
        async with self._turn:
            asked = self._broadcast(num_steps)
            try:
                answers = await asyncio.to_thread(asked.results, timeout_s=ANSWER_WITHIN_S, return_exceptions=True)
            except (RayError, TimeoutError) as error:
                raise Unavailable(f"no worker could be asked what it holds: {type(error).__name__}") from error
        views = [answer for answer in answers if isinstance(answer, dict)]
        return RollCall(views, sorted(set(self._expected()) - {view["worker"] for view in views}))
