"""The updates of one request between the streams that bring them and the task that reads them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection

from cluster.routing.run import Run, continuation
from planner.errors import RequestRefused
from planner.request import Request, Update
from worker.outbox import merged


class RemoteGeneration:
    """A `cluster.routing.fleet.Generation` whose sequences run on workers. Lives on the gateway's event loop.

    Two sides: its runs call `deliver`, `refuse` and `succeed`; the task that submitted calls `next` and `cancel`.
    What waits to be read is merged, one update an index, so it is bounded by the request's own budget however late
    the reader comes. The tokens of live sequences are kept, since another worker may have to go on from there.
    """

    def __init__(self, request_id: int, request: Request) -> None:
        self.request_id = request_id
        self.first_run = Run(self, request, range(request.n), asyncio.get_running_loop().time())
        self._request = request
        self._runs = dict.fromkeys(range(request.n), self.first_run)  # of live sequences
        self._tokens: dict[int, list[int]] = {index: [] for index in self._runs}
        self._begun = False
        self._num_cached: int | None = None
        self._num_prompt_logprobs = 0
        self._pending: dict[int, Update] = {}
        self._refusal: RequestRefused | None = None
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether nothing more is expected from any worker."""
        return not self._runs

    async def next(self) -> list[Update]:
        while not self._pending:
            if self._refusal is not None:
                raise self._refusal
            if self.over:
                return []  # every index was cancelled, perhaps while this waited
            await self._news.wait()
            self._news.clear()
        updates, self._pending = list(self._pending.values()), {}
        return updates

    def cancel(self, indices: Collection[int] | None = None) -> None:
        unwanted = self._runs.keys() | self._pending.keys() if indices is None else set(indices)
        self._pending = {index: update for index, update in self._pending.items() if index not in unwanted}
        ending: dict[Run, list[int]] = defaultdict(list)
        for index in sorted(self._runs.keys() & unwanted):
            ending[self._runs[index]].append(index)
            self._end(index)
        for run, ended in ending.items():
            run.cancel(ended)
        if ending:
            self._news.set()

    def deliver(self, update: Update) -> None:
        """Take in news of one live sequence. What the prompt found cached is told as the first worker told it."""
        if self._num_cached is None:
            self._num_cached = update.num_cached_tokens
        elif update.num_cached_tokens != self._num_cached:
            update = update._replace(num_cached_tokens=self._num_cached)
        self._num_prompt_logprobs += len(update.prompt_logprobs)
        if update.tokens:
            self._begun = True
            self._tokens[update.index] += update.tokens
        waiting = self._pending.get(update.index)
        self._pending[update.index] = update if waiting is None else merged(waiting, update)
        if update.finish_reason is not None:
            self._end(update.index)
        self._news.set()

    def refuse(self, refusal: RequestRefused) -> None:
        """No worker took the request."""
        self._refusal = refusal
        for index in list(self._runs):
            self._end(index)
        self._news.set()

    def succeed(self, run: Run, now: float) -> list[Run]:
        """Have other runs go on with the live sequences of `run`, which lost its worker.

        A request of which no token has come is run again as it was, with one prefill for all its sequences. So a
        continuation owes no log probabilities of the prompt: they come before the first token.
        """
        num_losses = run.num_losses + 1
        if self._begun:
            runs = [
                Run(self, continuation(self._request, index, self._tokens[index]), [index], now, num_losses)
                for index in sorted(run.live)
            ]
        else:
            runs = [Run(self, self._request, range(self._request.n), now, num_losses, self._num_prompt_logprobs)]
            runs[0].live &= run.live
        for successor in runs:
            self._runs |= dict.fromkeys(successor.live, successor)
        return runs

    def _end(self, index: int) -> None:
        del self._runs[index], self._tokens[index]
