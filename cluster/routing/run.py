"""What one worker is asked to run: a whole request, or the rest of one of its sequences.

A generation has one run to begin with. When its worker is lost, other runs go on where it stood: they are new requests,
made of the prompt and the tokens that have come. Not for deciding where and when: `cluster.routing.failover` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from planner.errors import RequestFailed, RequestRefused, WorkerLost
from planner.request import FinishReason, Request, Update, sequence_seed

if TYPE_CHECKING:
    from cluster.routing.generation import RemoteGeneration

SendCancel = Callable[[Collection[int] | None], None]


class Run:
    """Sequences of one generation that live and die with one submission. Lives on the gateway's event loop.

    Owner: its generation, which holds it as long as one of its sequences goes on; streams and failover know it weakly.

    * `live`: indices of its sequences that have not ended, as the generation counts them.
    * `num_losses`: how often these sequences have lost their worker before.
    * `waits_since`: when they last lost one, on the event loop's clock; for a first run, when it was made.
    * `refused_by`: workers that did not take it since.
    * `was_accepted`: whether a worker had taken it, or what it goes on with: then no worker's refusal is its end.
    * `loss`: why its worker gave it up, once it has.
    """

    def __init__(
        self,
        generation: RemoteGeneration,
        request: Request,
        indices: Collection[int],
        waits_since: float,
        num_losses: int = 0,
        num_scores_told: int = 0,
    ) -> None:
        """`indices[i]` is what the worker knows as i. `num_scores_told`: prompt log probabilities that came before."""
        self.request = request
        self.live = set(indices)
        self.waits_since = waits_since
        self.num_losses = num_losses
        self.refused_by: set[str] = set()
        self.was_accepted = num_losses > 0
        self.loss: WorkerLost | None = None
        self._indices = tuple(indices)
        self._num_scores_told = num_scores_told
        self._generation = weakref.ref(generation)
        self._send_cancel: SendCancel | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more is expected of it."""
        return not self.live

    def start(self, send_cancel: SendCancel) -> None:
        """It was sent to a worker; `send_cancel` tells that worker of indices as it knows them, or None for all."""
        self._send_cancel = send_cancel
        if ended := [place for place, index in enumerate(self._indices) if index not in self.live]:
            send_cancel(ended)

    def stop(self) -> None:
        """No worker has it any more."""
        self._send_cancel = None

    def cancel(self, indices: Collection[int]) -> None:
        """End some of its sequences; their generation wants no more of them."""
        self.live.difference_update(indices)
        if self._send_cancel is not None:
            ended = [place for place, index in enumerate(self._indices) if index in indices]
            self._send_cancel(ended if self.live else None)

    def deliver(self, update: Update) -> None:
        """Take in a worker's news of one sequence; what comes for one that is over is dropped.

        A sequence that ends by a fault of its worker goes on: `loss` then says why it must do so elsewhere.
        """
        generation = self._generation()
        index = self._indices[update.index] if update.index < len(self._indices) else None
        if generation is None or index not in self.live:
            return
        if (loss := _loss(update)) is not None:
            self.loss = loss
            if not (update.tokens or update.prompt_logprobs):
                return
            update = update._replace(finish_reason=None, error=None)
        if update.request_id != generation.request_id:  # it was sent again, under another id
            num_known = min(self._num_scores_told, len(update.prompt_logprobs))
            self._num_scores_told -= num_known
            scores = update.prompt_logprobs[num_known:]
            update = update._replace(request_id=generation.request_id, index=index, prompt_logprobs=scores)
        if update.finish_reason is not None:
            self.live.discard(index)
        generation.deliver(update)

    def refuse(self, refusal: RequestRefused) -> None:
        """No worker takes a request that none has taken before: its generation ends with the refusal."""
        self.live.clear()
        if (generation := self._generation()) is not None:
            generation.refuse(refusal)

    def fail(self, error: RequestFailed) -> None:
        """No worker goes on with it: each sequence fails, after the tokens that did come."""
        if (generation := self._generation()) is not None:
            for index in sorted(self.live):
                generation.deliver(Update(generation.request_id, index, finish_reason=FinishReason.FAILED, error=error))
        self.live.clear()

    def successors(self, now: float) -> list[Run]:
        """Runs, not started yet, that go on with its live sequences; it is over itself."""
        generation = self._generation()
        runs = [] if generation is None else generation.succeed(self, now)
        self.live.clear()
        return runs


def continuation(request: Request, index: int, tokens: Sequence[int]) -> Request:
    """The request for what is left of the index-th sequence of `request` after `tokens`: it draws the same tokens."""
    sampling = replace(request.sampling, seed=sequence_seed(request.sampling.seed, index))
    return replace(
        request,
        prompt=np.concatenate([request.prompt, np.asarray(tokens, request.prompt.dtype)]),
        sampling=sampling,
        max_tokens=request.max_tokens - len(tokens),
        min_tokens=max(0, request.min_tokens - len(tokens)),
        n=1,
        num_generated=len(tokens),
        prompt_logprobs=False,
    )


def _loss(update: Update) -> WorkerLost | None:
    """What took a sequence from its worker before its end: the engine died, or gave up what nobody had cancelled."""
    if update.finish_reason is FinishReason.CANCELLED:
        return WorkerLost("the worker ended before this sequence did")
    return update.error if isinstance(update.error, WorkerLost) else None
