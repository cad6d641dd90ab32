"""The metadata of GGUF files under the name by which the export knows it; `worker.gguf_layout` reads them."""

from __future__ import annotations

from worker.gguf_layout import read_gguf_header

__all__ = ["read_gguf_header"]
