"""On a GPU host: what `raycomb serve` counts before Ray starts is what there is."""

from __future__ import annotations

import os

import pytest
import torch

from cluster.serving.gpus import VISIBLE, num_gpus

pytestmark = pytest.mark.gpu


def test_the_driver_tells_as_many_gpus_as_torch_sees() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert num_gpus() == torch.cuda.device_count() >= 1
    assert num_gpus({VISIBLE: ""}) == 0
    assert num_gpus({name: value for name, value in os.environ.items() if name != VISIBLE}) >= num_gpus()
