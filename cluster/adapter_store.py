"""The Ray cluster's store as an `AdapterStore`: what is in it outlives processes, and ends with the cluster."""

from __future__ import annotations

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from cluster.shared_secret import NAMESPACE


class KvAdapterStore:
    """One deployment of workers of one application."""

    def __init__(self, app_name: str, deployment_name: str) -> None:
        self._prefix = f"adapter/{app_name}/{deployment_name}/"

    def read(self) -> dict[str, str]:
        names = [
            key.decode().removeprefix(self._prefix) for key in _internal_kv_list(self._prefix, namespace=NAMESPACE)
        ]
        values = {name: _internal_kv_get(self._prefix + name, namespace=NAMESPACE) for name in names}
        return {name: value.decode() for name, value in values.items() if value is not None}  # else it went meanwhile

    def write(self, name: str, value: str) -> None:
        _internal_kv_put(self._prefix + name, value, overwrite=True, namespace=NAMESPACE)

    def erase(self, name: str) -> None:
        _internal_kv_del(self._prefix + name, namespace=NAMESPACE)
