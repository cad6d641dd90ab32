"""Which tests one process runs, where several processes run tests side by side.

The group marks of pytest-xdist 3.8 have no effect with pytest 9.2: they travel in the ids of tests, which it keeps.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

from xdist.scheduler import LoadScopeScheduling

FILES_THAT_SHARE: Final = {
    "smollm2_service": (
        "test_affinity_service.py",
        "test_cancel_storm.py",
        "test_failover_service.py",
        "test_metrics_service.py",
        "test_openai_client.py",
        "test_page_service.py",
        "test_service.py",
        "test_smoke.py",
    ),
    "fronted_service": ("test_grpc_service.py", "test_serve_app.py"),
    "stormed_service": ("test_failover_storm.py", "test_soak.py", "test_traces_service.py"),
}
SERVICES: Final = {file: service for service, files in FILES_THAT_SHARE.items() for file in files}
FRONTS: Final = ("haproxy", "python")


class OneServiceInOneProcess(LoadScopeScheduling):
    """A service that files share is started once; other files are a group each. The largest groups come first."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(test: str) -> str:
    """By the id of a test. `fronted_service` is two services, which have nothing in common."""
    path, _, name = test.partition("::")
    file = PurePath(path).name
    parameters = name.partition("[")[2].rstrip("]").split("-")
    return " ".join([SERVICES.get(file, file), *(front for front in FRONTS if front in parameters)])
