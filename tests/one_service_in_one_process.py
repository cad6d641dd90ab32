"""Which tests one process runs, where several processes run tests side by side.

The group marks of pytest-xdist 3.8 have no effect with pytest 9.2: they travel in the ids of tests, which it keeps. And
the process that deals tests out knows nothing of them but their ids; so it reads in their files what they ask for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

SHARED_SERVICES: Final = ("smollm2_service", "fronted_service", "stormed_service")
"""Fixtures of a whole run, in tests/conftest.py."""

FRONTS: Final = ("haproxy", "python")

LONGEST: Final = "test_ray_up.py"
"""The group that takes longest, though it has few tests. Begun last, it would end last, with nothing beside it."""


class OneServiceInOneProcess(LoadScopeScheduling):
    """A service that files share is started once; other files are a group each. The largest groups come first, but for
    `LONGEST`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._services = services_of_files(Path(__file__).parent)

    def _assign_work_unit(self, node: WorkerController) -> None:
        if LONGEST in self.workqueue:
            self.workqueue.move_to_end(LONGEST, last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid, self._services)


def services_of_files(folder: Path) -> dict[str, str]:
    """The shared service that tests of a file ask for, by the file's name; the first one, should there be two."""
    found = {}
    for file in folder.glob("test_*.py"):
        asked = re.search(rf"\b({'|'.join(SHARED_SERVICES)}): ", file.read_text())
        if asked is not None:
            found[file.name] = asked[1]
    return found


def group_of(test: str, services: Mapping[str, str]) -> str:
    """By the id of a test. `fronted_service` is two services, which have nothing in common."""
    path, _, name = test.partition("::")
    file = PurePath(path).name
    parameters = name.partition("[")[2].rstrip("]").split("-")
    return " ".join([services.get(file, file), *(front for front in FRONTS if front in parameters)])


def end_services_that_are_not_wanted(item: pytest.Item, next_item: pytest.Item | None) -> None:
    """To be called after `item`. A shared service that `next_item` does not ask for would take a share of the cores,
    idle, until all tests are over, as its fixture is a whole run's. Whoever asks for it later has it started again."""
    if isinstance(item, pytest.Function):
        wanted = next_item.fixturenames if isinstance(next_item, pytest.Function) else ()
        for name in set(SHARED_SERVICES) & set(item.fixturenames) - set(wanted):
            for fixture in item.session._fixturemanager.getfixturedefs(name, item) or ():
                fixture.finish(item._request)  # type: ignore[arg-type]
