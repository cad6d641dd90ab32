"""How long a step's masks take on the host, without any model: tokens are drawn evenly from what the masks allow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.errors import GrammarFailed
from worker.grammars import Grammars
from worker.masks import BitMask, ConstrainedRow
from worker.vocabulary import Vocabulary

_PERCENTILES = (50, 90, 99)


def mask_times(vocabulary: Vocabulary, grammars: Sequence[str], num_steps: int) -> dict[str, Any]:
    """Milliseconds of each step's masks, one sequence a grammar, until all have ended or for `num_steps`: percentiles
    (50, 90, 99) on the clock and of all threads' time; and the share of rows that had one token left to draw."""
    maker, draw = Grammars(lambda: vocabulary), np.random.default_rng(0)
    generated: list[list[int]] = [[] for _ in grammars]
    live = list(range(len(grammars)))
    clock: list[float] = []
    threads: list[float] = []
    forced = num_rows = 0
    while live and len(clock) < num_steps:
        rows = [ConstrainedRow(each, grammars[each], np.array(generated[each], dtype=np.int64)) for each in live]
        began, used = time.perf_counter(), time.process_time()
        masks = maker.masks(rows)
        clock.append(1000 * (time.perf_counter() - began))
        threads.append(1000 * (time.process_time() - used))
        for each, mask in zip(tuple(live), masks, strict=True):
            allowed = _allowed(mask)
            forced, num_rows = forced + (len(allowed) == 1), num_rows + 1
            token = int(draw.choice(allowed))
            generated[each].append(token)
            if token in vocabulary.eos_ids:
                live.remove(each)
    maker.close()
    # The first step's masks wait for the vocabulary and the grammars.
    return {"clock_ms": _told(clock[1:]), "threads_ms": _told(threads[1:]), "forced": round(forced / num_rows, 3)}


def _allowed(mask: BitMask | GrammarFailed) -> np.ndarray[Any, np.dtype[np.intp]]:
    assert not isinstance(mask, GrammarFailed), mask
    return np.flatnonzero(np.unpackbits(mask, bitorder="little"))


def _told(times: Sequence[float]) -> list[float]:
    return [round(float(np.percentile(times, each)), 3) for each in _PERCENTILES]
