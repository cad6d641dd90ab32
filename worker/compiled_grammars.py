"""Compiled grammars, kept for the next request that has them: several of one where several sequences follow it.

What is copied from a compiled grammar shares its automaton with it, behind a lock, so that masks of all copies of one
are made one after the other (llguidance 1.9; 32 rows on eight threads took as long as on one). So a grammar in use is
compiled again, in the background, until there is one for each thread that makes masks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

MAX_COMPILED: Final = 128

Compiled = TypeVar("Compiled")


@dataclass(slots=True, eq=False)
class Source(Generic[Compiled]):
    """A grammar that was compiled once, or is about to be; at its start, where nobody advances it. `num_users`: whose
    state was copied from it."""

    compiled: Future[Compiled]
    num_users: int = 0


class CompiledGrammars(Generic[Compiled]):
    """Owner: `worker.grammars.Grammars`. Nothing here blocks."""

    def __init__(
        self, compile_grammar: Callable[[str], Compiled], background: ThreadPoolExecutor, max_sources: int
    ) -> None:
        """`compile_grammar` is called on `background`'s threads. A grammar has at most `max_sources` sources, and all
        together `MAX_COMPILED`."""
        self._compile, self._background, self._max_sources = compile_grammar, background, max_sources
        self._sources: OrderedDict[str, list[Source[Compiled]]] = OrderedDict()

    def prepare(self, grammar: str) -> None:
        """Begin to compile, unless that was done."""
        self._known(grammar)

    def take(self, grammar: str) -> Source[Compiled]:
        """A source for one more state: the least used that is ready, or else the one that will be first. Whoever takes
        it gives it back."""
        sources = self._known(grammar)
        ready = [source for source in sources if source.compiled.done()]
        chosen = min(ready or sources[:1], key=lambda source: source.num_users)
        if chosen.num_users > 0 and len(ready) == len(sources) < self._max_sources and self._num_sources < MAX_COMPILED:
            self._compile_once_more(grammar)
        chosen.num_users += 1
        return chosen

    def is_crowded(self, grammar: str, source: Source[Compiled]) -> bool:
        """Whether `take` would give a state of this source another one that has fewer users with it."""
        others = self._sources.get(grammar, ())
        return any(other.num_users + 1 < source.num_users and other.compiled.done() for other in others)

    def give_back(self, source: Source[Compiled]) -> None:
        source.num_users -= 1

    def _known(self, grammar: str) -> list[Source[Compiled]]:
        if grammar not in self._sources:
            self._compile_once_more(grammar)
        self._sources.move_to_end(grammar)
        return self._sources[grammar]

    def _compile_once_more(self, grammar: str) -> None:
        sources = self._sources.setdefault(grammar, [])
        sources.append(Source(self._background.submit(self._compile, grammar)))
        while self._num_sources > MAX_COMPILED:
            self._forget_one(grammar)

    @property
    def _num_sources(self) -> int:
        return sum(map(len, self._sources.values()))

    def _forget_one(self, wanted: str) -> None:
        """An idle source of a grammar that has others, or else all of the grammar that was asked for longest ago."""
        for sources in self._sources.values():
            idle = next((source for source in sources[1:] if source.num_users == 0), None)
            if idle is not None:
                sources.remove(idle)
                return
        self._sources.popitem(last=next(iter(self._sources)) == wanted)
