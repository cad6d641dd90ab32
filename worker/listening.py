"""How the servers of the data plane begin to listen: those of workers, and that of the owner of sessions."""

from __future__ import annotations

import grpc


async def listen(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> str:
    """Start `server` at `host`, as an address spells it, and `port`, 0 for any that is free; gives the "host:port".

    Without `credentials` it speaks plaintext. Raises `RuntimeError` when the port is taken."""
    address = f"{host}:{port}"
    bound = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    return f"{host}:{bound}"
