"""Where others reach this process' node."""

from __future__ import annotations

import ray


def node_address() -> str:
    """The address of this node, as Ray knows it."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return address
