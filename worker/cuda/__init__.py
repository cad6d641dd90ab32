"""Forwards on NVIDIA GPUs: kernels, captured graphs, and the executor that never waits for them."""
