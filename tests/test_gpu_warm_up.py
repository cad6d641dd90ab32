"""Steps that an executor on a GPU runs at its start: what has no room is told there, and not to clients. Runs on a GPU,
or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not (os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = pytest.mark.gpu

from planner.step import ChunkOutput, Step, StepResult  # noqa: E402
from tests.cuda_rig import Model, cuda_executor, tiny_model  # noqa: E402
from worker.cuda.prefill import PrefillChain  # noqa: E402
from worker.cuda.prefill_plan import PrefillPlan  # noqa: E402
from worker.cuda.warm_up import warm_up  # noqa: E402
from worker.executor import ProgramInfo  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


class FullAt:
    """A prefill chain whose device has no room for forwards of so many tokens."""

    def __init__(self, chain: PrefillChain, num_tokens: int) -> None:
        self._chain, self._num_tokens = chain, num_tokens

    def hidden(self, tokens: torch.Tensor, plan: PrefillPlan, rows: torch.Tensor) -> torch.Tensor:
        if len(tokens) >= self._num_tokens:
            raise torch.OutOfMemoryError("no room for it")
        return self._chain.hidden(tokens, plan, rows)


def test_a_widest_prefill_without_room_is_told_at_the_start(model: Model) -> None:
    executor = cuda_executor(model, max_prefill_tokens=16, widths=(1, 2), prefill=lambda chain: FullAt(chain, 16))
    with pytest.raises(torch.OutOfMemoryError, match="16 tokens in 2 chunks"):
        warm_up(executor, 64)


def test_warming_up_leaves_all_slots_free(model: Model) -> None:
    executor = cuda_executor(model, max_prefill_tokens=16, widths=(1, 2))
    warm_up(executor, 64)
    warm_up(executor, 64)
    assert not executor.has_lost_any


class Noting:
    """Runs nothing; keeps the steps."""

    has_lost_any = False

    def __init__(self, info: ProgramInfo) -> None:
        self.info = info
        self.steps: list[Step] = []

    def launch(self, step: Step) -> None:
        self.steps.append(step)

    def collect(self) -> StepResult:
        return StepResult([ChunkOutput() for _ in self.steps[-1].chunks])


@pytest.mark.parametrize("context", [1, 2, 3, 100])
@pytest.mark.parametrize("num_cells", [1, 40, 1000])
def test_warming_up_keeps_to_any_context(model: Model, context: int, num_cells: int) -> None:
    """A drawn token is at a position of the context, and a chunk has at least one token."""
    noting = Noting(replace(model.info(num_cells, (1, 2, 4), max_prefill_tokens=64), context=context))
    warm_up(noting, num_cells)
    chunks = [chunk for step in noting.steps for chunk in step.chunks]
    assert chunks
    for chunk in chunks:
        assert chunk.length >= 1
        assert chunk.start + chunk.length + chunk.samples <= context
