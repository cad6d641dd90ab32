"""Which tokens may come next, where an answer must follow a grammar: one bit a token, for each such row of a step.

The state of a row is a function of its grammar and of the tokens generated so far, which ride on the chunk. So it is
made again by replaying them wherever a sequence goes on: after preemption, and on another worker. Grammars are
compiled by llguidance, on a thread of their own and once for all sequences that have the same one.

Free of torch. `check_grammar` is what gateways refuse bad grammars with, under the same limits.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from planner.errors import GrammarFailed, SetupError, UnsupportedModel
from worker.masks import BitMask, ConstrainedRow
from worker.vocabulary import Vocabulary, VocabularySource

MAX_COMPILED: Final = 128  # grammars that are kept for the next request that has them
_MAX_THREADS: Final = 8
_MAX_SPELLED: Final = 4096  # texts whose ids are remembered


@dataclass(slots=True)
class _State:
    matcher: LLMatcher
    num_consumed: int = 0


class Grammars:
    """A `worker.masks.MaskMaker`: compiled grammars, and the state of each sequence that follows one.

    Owner: an executor. `prepare` and `drop` never block and are called by its thread; `masks` by one thread at a time.
    """

    def __init__(self, vocabulary: VocabularySource) -> None:
        """Begins to read the vocabulary at once, in the background."""
        self._background = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._tokenizer = self._background.submit(_make_tokenizer, vocabulary)
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._states: dict[int, _State] = {}
        self._filler = LLExecutor(max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2)))

    def prepare(self, grammar: str) -> None:
        """Begin to compile, unless that was done."""
        self._matcher(grammar)

    def drop(self, sequence_ids: Iterable[int]) -> None:
        """Forget these sequences; those that follow no grammar are passed over."""
        for sequence_id in sequence_ids:
            self._states.pop(sequence_id, None)

    def masks(self, rows: Sequence[ConstrainedRow]) -> list[BitMask | GrammarFailed]:
        """What each row may draw, or why its sequence cannot go on. Waits for what is still being compiled."""
        found: list[BitMask | GrammarFailed] = []
        matchers: list[tuple[LLMatcher, int]] = []
        for row in rows:
            try:
                matchers.append((self._advance(row), len(matchers)))
                found.append(_NOTHING)
            except GrammarFailed as error:
                found.append(error)
        if not matchers:
            return found
        size = -(-self._tokenizer.result().vocab_size // 32) * 4
        filled = np.zeros((len(matchers), size), dtype=np.uint8)
        self._filler.unsafe_compute_mask_ptr(matchers, filled.ctypes.data, size, len(matchers))
        following = iter(zip(matchers, filled, strict=True))
        for place, row in enumerate(rows):
            if isinstance(found[place], GrammarFailed):
                continue
            (matcher, _), mask = next(following)
            found[place] = _failure(matcher) or _without(mask, row.masked)
        return found

    def close(self) -> None:
        """Forget everything; what is being compiled is not waited for."""
        self._states.clear()
        self._background.shutdown(wait=False, cancel_futures=True)

    def _matcher(self, grammar: str) -> Future[LLMatcher]:
        """A matcher at the grammar's start, that nobody advances."""
        known = self._compiled.get(grammar)
        if known is None:
            known = self._compiled[grammar] = self._background.submit(_compile, grammar, self._tokenizer)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return known

    def _advance(self, row: ConstrainedRow) -> LLMatcher:
        """The row's matcher, after the tokens that came since it was last asked. Raises `GrammarFailed`."""
        state = self._states.get(row.sequence_id)
        if state is None:
            try:
                state = _State(self._matcher(row.grammar).result().deep_copy())
            except SetupError as error:
                raise GrammarFailed(error.message) from error
            self._states[row.sequence_id] = state
        for token in row.generated[state.num_consumed :].tolist():
            if not state.matcher.is_stopped():  # behind a finished answer there is only its end
                state.matcher.consume_token(token)
            state.num_consumed += 1
        if (failure := _failure(state.matcher)) is not None:
            raise failure
        return state.matcher


_NOTHING: Final[BitMask] = np.zeros(0, dtype=np.uint8)


def check_grammar(grammar: str) -> str | None:
    """What is wrong with a grammar, in the library's words; None where it compiles."""
    return LLMatcher.validate_grammar(grammar, limits=_limits()) or None


def _limits() -> LLParserLimits:
    """What may be spent on one grammar: some 20 ms to compile it, 15 ms a token, and 100 MB."""
    return LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)


def _make_tokenizer(source: VocabularySource) -> LLTokenizer:
    vocabulary = source()
    if not vocabulary.eos_ids:
        raise UnsupportedModel("the model has no token that ends an answer, so no answer of it can follow a grammar")
    return LLTokenizer(TokenizerWrapper(_Spellings(vocabulary)), eos_token=sorted(vocabulary.eos_ids))


def _compile(grammar: str, tokenizer: Future[LLTokenizer]) -> LLMatcher:
    return LLMatcher(tokenizer.result(), grammar, log_level=0, limits=_limits())


def _failure(matcher: LLMatcher) -> GrammarFailed | None:
    if not matcher.is_error():
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
