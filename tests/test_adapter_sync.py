"""All workers are told to follow the catalogue: one that is gone has nothing to say, one that fails says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from cluster.adapters.sync import sync_workers
from planner.errors import Unavailable


@dataclass
class Said:
    """What is used of Serve's answer."""

    answers: list[Any]

    def results(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        assert timeout_s > 0
        if self.answers == ["late"]:
            raise TimeoutError
        return self.answers


async def test_what_each_worker_says_is_told() -> None:
    assert await sync_workers(lambda: Said([{}, {"order": "why"}])) == [{}, {"order": "why"}]
    assert await sync_workers(lambda: Said([])) == []


async def test_a_worker_that_is_gone_has_nothing_to_say() -> None:
    assert await sync_workers(lambda: Said([ActorDiedError(), {}])) == [{}]


@pytest.mark.parametrize("answers", [[{}, RayTaskError("sync_adapters", "", ValueError())], ["late"]])
async def test_one_that_fails_or_says_nothing_is_told_of(answers: list[Any]) -> None:
    with pytest.raises(Unavailable, match="not every worker said"):
        await sync_workers(lambda: Said(answers))
