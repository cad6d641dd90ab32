"""The models of a service, each with what makes its answers, by the names that clients use."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from cluster.answers.maker import AnswerMaker, Service
from planner.errors import UnknownModel, UnknownSession


class Models:
    """Owner: a gateway; lives on its event loop. The first model answers where a request names none, and its service
    speaks for the whole in what is no model's business: keys, settings, records."""

    def __init__(self, makers: Sequence[AnswerMaker]) -> None:
        """At least one, whose names are all different."""
        self.all = tuple(makers)
        self.first = self.all[0]

    @property
    def services(self) -> list[Service]:
        return [maker.service for maker in self.all]

    @property
    def ready(self) -> bool:
        """Whether requests for every model are taken now."""
        return all(service.fleet.ready for service in self.services)

    @property
    def have_served(self) -> bool:
        """Whether every model has had a worker."""
        return all(service.fleet.model is not None for service in self.services)

    @property
    def known(self) -> list[AnswerMaker]:
        """Those whose model has had a worker; where there is none, the first, which says so."""
        return [maker for maker in self.all if maker.service.fleet.model is not None] or [self.first]

    def of(self, asked: str | None) -> AnswerMaker:
        """That of the model, or adapter, which a client calls so. Raises `UnknownModel` that names what there is; a
        single model says so itself."""
        if asked is None or len(self.all) == 1:
            return self.first
        for maker in self.all:
            if asked in maker.known_names:
                return maker
        there = ", ".join(name for maker in self.all for name in maker.known_names)
        raise UnknownModel(f"the model {asked!r} is not served here; there is: {there}", param="model")

    async def of_session(self, asked: str | None, session_id: str | None, account: str) -> AnswerMaker:
        """That of the model which a session is of, unless another one is asked for. Raises `UnknownModel`, and what the
        owner of sessions raises."""
        if asked is None and session_id is not None and len(self.all) > 1:
            for maker in self.all:
                with suppress(UnknownSession):
                    await maker.sessions.get(session_id, account)
                    return maker
        return self.of(asked)


def single(service: Service) -> Models:
    """A service of one model."""
    return Models([AnswerMaker(service)])
