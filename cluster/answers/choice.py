"""One choice of an answer: tokens come in, and the text that a client may see comes out.

Detokenising, stop strings, echo and log probabilities meet here. Tokens are taken one at a time, so what comes out
in total does not depend on how the updates were cut.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

from cluster.language.detokeniser import Detokeniser, TokenBytes
from cluster.language.stop_strings import Scan, StopStrings
from planner.request import FinishReason, TokenLogprobs, Update

PIECE_SIZE: Final = 4
SCORE_SIZE: Final = 16
"""A piece, and a log probability, take as long to write as so many characters take to be read."""


class Ending(Enum):
    """Why a choice ended, in the words of the wire."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token's log probabilities, and where its text begins in the choice's text, in characters."""

    logprobs: TokenLogprobs
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one choice has to say next. The last piece of a choice, and only it, has an `ending`.

    `tokens` are those that came since the piece before, whether their text is shown, held back or hidden.
    """

    index: int
    text: str
    scores: tuple[ScoredToken, ...] = ()
    ending: Ending | None = None
    tokens: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How long it takes to write, in characters; its log probabilities have as many alternatives each."""
        if not self.scores:
            return PIECE_SIZE
        return PIECE_SIZE + SCORE_SIZE * len(self.scores) * (1 + len(self.scores[-1].logprobs.top))


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, given back at the head of a choice."""

    text: str
    scores: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens become the text that is shown.

    `stops` end it, and are shown where `keeps_stop`, but not before `min_tokens` tokens have come. Of special
    tokens `marks` are shown, or all (`shows_special`). `num_top`: so many alternatives of each token are told; None:
    all that came.
    """

    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    min_tokens: int = 0
    shows_special: bool = False
    marks: frozenset[int] = frozenset()
    num_top: int | None = None


class Choice:
    """Owner: the answer it belongs to. `index` is the choice's place in the whole answer."""

    def __init__(self, index: int, tokens: TokenBytes, rules: TextRules, *, scored: bool) -> None:
        self.index = index
        self.num_tokens = 0
        self.ended = False
        self._detokeniser = Detokeniser(tokens, with_special=rules.shows_special, marks=rules.marks)
        self._rules = rules
        self._stops = StopStrings(rules.stops, kept=rules.keeps_stop) if rules.stops else None
        self._scored = scored
        self._waiting: deque[ScoredToken] = deque()
        self._known = 0  # characters decoded so far, the echo included
        self._shown = 0  # of these, the characters that left

    @property
    def begun(self) -> bool:
        return self._known > 0 or self.num_tokens > 0

    def echo(self, echo: Echo) -> Piece:
        """The prompt's own piece; comes before any other."""
        assert not self.begun
        self._known = self._shown = len(echo.text)
        return Piece(self.index, echo.text, echo.scores)

    def end(self, ending: Ending) -> Piece:
        """Ends a choice that generates nothing."""
        self.ended = True
        return Piece(self.index, "", ending=ending)

    def take(self, update: Update) -> Piece | None:
        """What `update` lets be shown; None when nothing. A stop string may end the choice before its sequence ends.

        Must not be called after the end, nor with a failed or cancelled update.
        """
        assert not self.ended
        shown = []
        for position, token in enumerate(update.tokens):
            self.num_tokens += 1
            if self._scored:
                self._waiting.append(ScoredToken(self._trimmed(update.logprobs[position]), self._known))
            last = position == len(update.tokens) - 1
            hidden = last and update.finish_reason is FinishReason.STOP and not self._rules.keeps_stop
            scan = self._scan("" if hidden else self._detokeniser.add(token))
            shown.append(scan.text)
            if scan.stopped:
                return self._piece("".join(shown), Ending.STOP, update.tokens[: position + 1], cut=True)
        if update.finish_reason is None:
            text = "".join(shown)
            return self._piece(text, None, update.tokens) if text or update.tokens else None
        tail = self._finish()
        ending = Ending.LENGTH if update.finish_reason is FinishReason.LENGTH and not tail.stopped else Ending.STOP
        return self._piece("".join(shown) + tail.text, ending, update.tokens, cut=tail.stopped)

    def _scan(self, piece: str) -> Scan:
        self._known += len(piece)
        if self._stops is None or self.num_tokens <= self._rules.min_tokens:
            return Scan(piece, stopped=False)
        return self._stops.push(piece)

    def _trimmed(self, score: TokenLogprobs) -> TokenLogprobs:
        num_top = self._rules.num_top
        return score if num_top is None else TokenLogprobs(score.token, score.logprob, score.top[:num_top])

    def _finish(self) -> Scan:
        """The text that is left when the sequence has ended: half a character, and what might have become a stop."""
        scan = self._scan(self._detokeniser.finish())
        if scan.stopped or self._stops is None:
            return scan
        tail = self._stops.finish()
        return Scan(scan.text + tail.text, tail.stopped)

    def _piece(self, text: str, ending: Ending | None, tokens: tuple[int, ...], *, cut: bool = False) -> Piece:
        """Scores leave with their text: those of hidden text wait, and go with it when a stop string cuts it off."""
        self._shown += len(text)
        self.ended = ending is not None
        over = self.ended and not cut
        scores = []
        while self._waiting and (over or self._waiting[0].offset < self._shown):
            scores.append(self._waiting.popleft())
        return Piece(self.index, text, tuple(scores), ending, tokens)
