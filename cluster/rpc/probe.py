"""Asks a gRPC front whether it serves, as load balancers do."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as pb_grpc

TIMEOUT_S = 2.0
DIRECT = [("grpc.enable_http_proxy", 0)]
"""A proxy that this machine uses for the world outside does not reach the machine itself."""


def is_serving(target: str) -> bool:
    """Whether `target` (host:port, plaintext) says SERVING now."""
    with grpc.insecure_channel(target, DIRECT) as channel:
        try:
            answer = pb_grpc.HealthStub(channel).Check(pb.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == pb.HealthCheckResponse.SERVING)
