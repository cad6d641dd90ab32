"""What becomes of a step's chunks when the device has no memory for them.

The planner hears of a failure when the step is collected. Until then it may plan further chunks of the same sequences,
which must not run: they would read what was never written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from worker.cuda.outcomes import StepRun


class Failures:
    """Owner of the sequences that have failed and that the planner does not know yet to have. Owner and only caller:
    the executor."""

    def __init__(self) -> None:
        self._failed: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._failed)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """The planner has dropped these."""
        self._failed.difference_update(sequence_ids)

    def fail(self, run: StepRun, indices: Sequence[int], message: str) -> None:
        """These chunks of the step, and what else comes of their sequences."""
        run.fail(indices, message)
        self._failed.update(run.chunks[index].sequence_id for index in indices)

    def refuse(self, run: StepRun) -> None:
        """Fail the chunks of a new step that were planned before their sequence's failure was known."""
        late = [index for index, chunk in enumerate(run.chunks) if chunk.sequence_id in self._failed]
        run.fail(late, "the forward of the step before failed")

    def lose(self, sequence_ids: Iterable[int]) -> None:
        """Sequences that have failed though the step runs nothing of them."""
        self._failed.update(sequence_ids)

    @contextmanager
    def room_for(self, run: StepRun, indices: Sequence[int], what: str) -> Iterator[None]:
        """Where the device has no memory for what is done here, these chunks of the step fail, and no more."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.fail(run, indices, f"{what} did not fit into the GPU's memory: {error}")
