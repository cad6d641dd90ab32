"""The Ray cluster's store as an `AdapterStore`: what is in it outlives processes, and ends with the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from cluster.access.shared_secret import NAMESPACE
from planner.errors import Unavailable


class KvAdapterStore:
    """One deployment of workers of one application. Raises `Unavailable` where the cluster's store does not answer."""

    def __init__(self, app_name: str, deployment_name: str) -> None:
        self._prefix = f"adapter/{app_name}/{deployment_name}/"

    def read(self) -> dict[str, str]:
        with _answering():
            names = [key.decode() for key in _internal_kv_list(self._prefix, namespace=NAMESPACE)]
            values = {name: _internal_kv_get(name, namespace=NAMESPACE) for name in names}
        return {
            name.removeprefix(self._prefix): value.decode()
            for name, value in values.items()
            if value is not None  # else it went meanwhile
        }

    def write(self, name: str, value: str) -> None:
        with _answering():
            _internal_kv_put(self._prefix + name, value, overwrite=True, namespace=NAMESPACE)

    def erase(self, name: str) -> None:
        with _answering():
            _internal_kv_del(self._prefix + name, namespace=NAMESPACE)

    def clear(self) -> None:
        """Forget everything: a service begins that is not the one before it."""
        with _answering():
            _internal_kv_del(self._prefix, del_by_prefix=True, namespace=NAMESPACE)


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except RayError as error:
        raise Unavailable(f"the cluster's store does not answer: {type(error).__name__}") from error
