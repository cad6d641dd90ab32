"""Which tokens may come next, where an answer must follow a grammar: one bit a token, for each such row of a step.

The state of a row is a function of its grammar and of the tokens generated so far, which ride on the chunk. So it is
made again by replaying them wherever a sequence goes on: after preemption, and on another worker. Grammars are
compiled by llguidance, on a thread of their own, and kept (`worker.compiled_grammars`).

Free of torch. `check_grammar` is what gateways refuse bad grammars with, under the same limits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from planner.errors import GrammarFailed, SetupError, UnsupportedModel
from worker.compiled_grammars import CompiledGrammars, Source
from worker.deep_stack import on_deep_stack
from worker.masks import BitMask, ConstrainedRow
from worker.vocabulary import Vocabulary, VocabularySource

_MAX_THREADS: Final = 8
_MAX_REPLAYED: Final = 64  # tokens, so that a state moves in less than its masks take
_MAX_SPELLED: Final = 4096  # texts whose ids are remembered
_DEAD_END: Final = "NoExtensionBias"  # the library's word for: no text goes on from here, nor may it end

# Where RUST_BACKTRACE is set, the library takes a backtrace at each level that an error rises through, and a fault
# below thousands of rules is found in minutes instead of a tenth of a second. Backtraces of panics stay.
os.environ.setdefault("RUST_LIB_BACKTRACE", "0")


@dataclass(slots=True)
class _State:
    source: Source[LLMatcher]
    matcher: LLMatcher
    num_consumed: int = 0


class Grammars:
    """A `worker.masks.MaskMaker`: compiled grammars, and the state of each sequence that follows one.

    Owner: an executor. `prepare` and `drop` never block and are called by its thread; `masks` by one thread at a time.
    """

    def __init__(self, vocabulary: VocabularySource, num_threads: int | None = None) -> None:
        """Begins to read the vocabulary at once, in the background. `num_threads` make masks; None: half of the cores,
        and at most eight."""
        self._background = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._tokenizer = self._background.submit(_make_tokenizer, vocabulary)
        num_threads = num_threads or max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._filler = LLExecutor(num_threads)
        self._compiled = CompiledGrammars(self._compile, self._background, num_threads)
        self._states: dict[int, _State] = {}

    def prepare(self, grammar: str) -> None:
        """Begin to compile, unless that was done."""
        self._compiled.prepare(grammar)

    def drop(self, sequence_ids: Iterable[int]) -> None:
        """Forget these sequences; those that follow no grammar are passed over."""
        for sequence_id in sequence_ids:
            state = self._states.pop(sequence_id, None)
            if state is not None:
                self._compiled.give_back(state.source)

    def masks(self, rows: Sequence[ConstrainedRow]) -> list[BitMask | GrammarFailed]:
        """What each row may draw, or why its sequence cannot go on; a mask without a bit where the grammar has no next
        token. Waits for what is still being compiled."""
        found: list[BitMask | GrammarFailed] = [_NOTHING] * len(rows)
        states: list[tuple[int, _State]] = []
        for place, row in enumerate(rows):
            try:
                states.append((place, self._advance(row)))
            except GrammarFailed as error:
                found[place] = error
        if not states:
            return found
        size = -(-self._tokenizer.result().vocab_size // 32) * 4
        filled = np.zeros((len(rows), size), dtype=np.uint8)
        # Neighbours are made by one thread, and those of one source would wait for each other.
        apart = sorted(((id(state.source), state.matcher, place) for place, state in states), key=itemgetter(0))
        matchers = [(matcher, place) for _, matcher, place in apart]
        self._filler.unsafe_compute_mask_ptr(matchers, filled.ctypes.data, size, len(rows))
        for place, state in states:
            if _is_dead_end(state.matcher):
                filled[place] = 0  # the library lets the end through
            found[place] = _failure(state.matcher) or _without(filled[place], rows[place].masked)
        return found

    def forced(self, rows: Sequence[ConstrainedRow]) -> list[tuple[int, ...]]:
        """What each row's grammar leaves no choice in, the drawn token first; empty where it leaves one. Of rows whose
        masks were asked for in the same step. Each token is drawn by itself where `masked` says what may not be."""
        return [() if row.masked else self._forced(row.sequence_id) for row in rows]

    def close(self) -> None:
        """Forget everything; what is being compiled is not waited for."""
        self._states.clear()
        self._background.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        tokenizer = self._tokenizer.result()
        return on_deep_stack(lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=_limits()))

    def _advance(self, row: ConstrainedRow) -> _State:
        """The row's state, after the tokens that came since it was last asked. Raises `GrammarFailed`."""
        state = self._states.get(row.sequence_id)
        if state is None or self._should_move(row.grammar, state):
            self.drop([row.sequence_id])
            state = self._states[row.sequence_id] = self._begun(row.grammar)
        for token in row.generated[state.num_consumed :].tolist():
            if not state.matcher.is_stopped():  # behind a finished answer there is only its end
                state.matcher.consume_token(token)
            state.num_consumed += 1
        if (failure := _failure(state.matcher)) is not None:
            raise failure
        return state

    def _forced(self, sequence_id: int) -> tuple[int, ...]:
        state = self._states.get(sequence_id)
        if state is None or state.matcher.is_error() or state.matcher.is_stopped():
            return ()
        return tuple(state.matcher.compute_ff_tokens())

    def _should_move(self, grammar: str, state: _State) -> bool:
        """Sequences that begin together share a source until there are more."""
        return state.num_consumed <= _MAX_REPLAYED and self._compiled.is_crowded(grammar, state.source)

    def _begun(self, grammar: str) -> _State:
        source = self._compiled.take(grammar)
        try:
            return _State(source, source.compiled.result().deep_copy())
        except SetupError as error:
            self._compiled.give_back(source)
            raise GrammarFailed(error.message) from error


_NOTHING: Final[BitMask] = np.zeros(0, dtype=np.uint8)


def check_grammar(grammar: str) -> str | None:
    """What is wrong with a grammar, in the library's words; None where it compiles."""
    return on_deep_stack(lambda: LLMatcher.validate_grammar(grammar, limits=_limits())) or None


def _limits() -> LLParserLimits:
    """What may be spent on one grammar: some 20 ms to compile it, 15 ms a token, and 100 MB."""
    return LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)


def _make_tokenizer(source: VocabularySource) -> LLTokenizer:
    vocabulary = source()
    if not vocabulary.eos_ids:
        raise UnsupportedModel("the model has no token that ends an answer, so no answer of it can follow a grammar")
    return LLTokenizer(TokenizerWrapper(_Spellings(vocabulary)), eos_token=sorted(vocabulary.eos_ids))


def _is_dead_end(matcher: LLMatcher) -> bool:
    return matcher.is_error() and matcher.get_error().splitlines()[0] == _DEAD_END


def _failure(matcher: LLMatcher) -> GrammarFailed | None:
    if not matcher.is_error() or _is_dead_end(matcher):
        return None
    return GrammarFailed(f"the answer's grammar cannot go on: {matcher.get_error().splitlines()[0]}")


def _without(mask: BitMask, masked: frozenset[int]) -> BitMask:
    """The mask less the bits of `masked`, or as it was where nothing would be left."""
    ids = np.array([token for token in masked if token < 8 * len(mask)], dtype=np.int64)
    if not len(ids):
        return mask
    less = mask.copy()
    np.bitwise_and.at(less, ids // 8, ~(np.uint8(1) << (ids % 8).astype(np.uint8)))
    return less if less.any() else mask


class _Spellings:
    """A vocabulary in the shape that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = min(vocabulary.eos_ids)
        self.bos_token_id = None
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special)
        # What a grammar leaves no choice in (a key, a comma) is asked again and again, by threads that would wait for
        # the interpreter's lock.
        self._encode = lru_cache(_MAX_SPELLED)(vocabulary.encode)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode(errors="replace") if isinstance(text, bytes) else text)
