"""A choice: what it shows in total does not depend on how its tokens arrived."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cluster.answers.choice import Choice, Echo, Ending, Piece, TextRules
from planner.request import FinishReason, TokenLogprobs, Update
from tests.tiny_text import EOS, tiny_text

TEXT = tiny_text()
TOKENS = st.lists(st.sampled_from([*TEXT.encode("abhe, lo🦙é"), 0]), max_size=16)
STOPS = st.lists(st.text(alphabet="abhe, é", min_size=1, max_size=4), max_size=3)
REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


def updates(tokens: list[int], reason: FinishReason, edges: list[int]) -> list[Update]:
    most = len(tokens) - (reason is FinishReason.STOP and bool(tokens))  # a stop token comes with the reason
    ends = [*sorted(min(edge, most) for edge in edges), len(tokens)]
    told = []
    for start, end in pairwise([0, *ends]):
        scores = tuple(TokenLogprobs(token, -float(token)) for token in tokens[start:end])
        last = end == len(tokens) and len(told) == len(ends) - 1
        told.append(Update(0, 0, tuple(tokens[start:end]), scores, finish_reason=reason if last else None))
    return told


def grow(told: list[Update], stops: list[str]) -> tuple[str, list[tuple[int, int]], Ending | None, int]:
    """All that a choice says: text, (token, offset) of the scores, ending, tokens that count."""
    choice = Choice(0, TEXT.tokens, TextRules(tuple(stops)), scored=True)
    pieces: list[Piece] = []
    for update in told:
        piece = choice.take(update)
        if piece is not None:
            pieces.append(piece)
        if choice.ended:
            break
    assert [piece.ending is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    scores = [(score.logprobs.token, score.offset) for piece in pieces for score in piece.scores]
    return "".join(piece.text for piece in pieces), scores, pieces[-1].ending, choice.num_tokens


@given(tokens=TOKENS, stops=STOPS, reason=REASONS, edges=st.lists(st.integers(0, 16), max_size=5))
def test_the_cut_of_the_updates_changes_nothing(
    tokens: list[int], stops: list[str], reason: FinishReason, edges: list[int]
) -> None:
    assert grow(updates(tokens, reason, edges), stops) == grow(updates(tokens, reason, []), stops)


@given(tokens=TOKENS, stops=STOPS, reason=REASONS)
def test_the_text_is_the_decoded_one_cut_at_the_first_stop(
    tokens: list[int], stops: list[str], reason: FinishReason
) -> None:
    spoken = tokens[:-1] if reason is FinishReason.STOP else tokens
    whole = TEXT.decode(spoken, with_special=False)
    places = [place for stop in stops if (place := whole.find(stop)) >= 0]
    text, scores, ending, num_tokens = grow(updates(tokens, reason, []), stops)
    assert text == (whole[: min(places)] if places else whole)
    assert ending == (Ending.STOP if places or reason is FinishReason.STOP else Ending.LENGTH)
    assert [offset for _, offset in scores] == sorted(offset for _, offset in scores)
    if places:
        assert all(offset < len(text) for _, offset in scores)
        assert num_tokens <= len(tokens)
    else:
        assert [token for token, _ in scores] == tokens
        assert num_tokens == len(tokens)


def test_an_echo_shifts_the_offsets_and_is_not_searched_for_stops() -> None:
    choice = Choice(3, TEXT.tokens, TextRules(("lo",)), scored=True)
    assert choice.echo(Echo("hello")) == Piece(3, "hello")
    ids = [*TEXT.encode("ab"), EOS]
    scores = tuple(TokenLogprobs(token, -1.0) for token in ids)
    piece = choice.take(Update(0, 0, tuple(ids), scores, finish_reason=FinishReason.STOP))
    assert piece is not None
    assert (piece.index, piece.text, piece.ending) == (3, "ab", Ending.STOP)
    assert [score.offset for score in piece.scores] == [5, 7]


def test_a_stop_that_began_in_the_last_held_text_still_counts_at_the_end() -> None:
    text, _, ending, _ = grow(updates(TEXT.encode("xab"), FinishReason.LENGTH, [1, 2]), ["ab", "xabc"])
    assert (text, ending) == ("x", Ending.STOP)
