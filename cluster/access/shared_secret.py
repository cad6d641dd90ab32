"""The secret between gateways and workers, kept by the Ray cluster: it stays while versions of a service take turns.

While a service is redeployed, gateways and workers of both versions are there, and what an old gateway runs goes on
at a new worker. Whoever reaches Ray's store owns the cluster anyway (`deploy/README.md`).
"""

from __future__ import annotations

import hashlib
import secrets

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_initialized, _internal_kv_put

KEY = b"data-plane-secret"
NAMESPACE = b"raycomb"


def cluster_secret() -> str | None:
    """The cluster's, made by whoever asks first; None where this process is not connected to a cluster."""
    if not _internal_kv_initialized():  # type: ignore[no-untyped-call]
        return None
    _internal_kv_put(KEY, secrets.token_hex(32), overwrite=False, namespace=NAMESPACE)
    return _internal_kv_get(KEY, namespace=NAMESPACE).decode()


def secret_fingerprint() -> str | None:
    """What tells one secret from another and is none itself; None while the cluster has none. Makes nothing."""
    if not _internal_kv_initialized():  # type: ignore[no-untyped-call]
        return None
    secret: bytes | None = _internal_kv_get(KEY, namespace=NAMESPACE)
    return None if secret is None else hashlib.sha256(secret).hexdigest()[:8]
