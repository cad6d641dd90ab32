"""Stop strings hide exactly what they must, however the text is cut into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from cluster.language.stop_strings import StopStrings

SMALL = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def watch(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    watched = StopStrings(stops)
    shown = ""
    for piece in pieces:
        scan = watched.push(piece)
        shown += scan.text
        if scan.stopped:
            return shown, True
    scan = watched.finish()
    return shown + scan.text, scan.stopped


def cut_whole(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The oracle: look at the whole text at once."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


@given(text=SMALL, stops=STOPS, cuts=st.lists(st.integers(0, 12)))
@example(text="abcd", stops=["abcd", "bc"], cuts=[1, 2, 3])
@example(text="abc", stops=["abcd", "bc"], cuts=[1, 2, 3])
@example(text="aab", stops=["ab"], cuts=[1, 2])
def test_pieces_are_cut_as_the_whole_text_would_be(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert watch(pieces, stops) == cut_whole(text, stops)


@given(text=SMALL, stops=STOPS)
def test_nothing_is_held_back_that_cannot_become_a_stop(text: str, stops: list[str]) -> None:
    watched = StopStrings(stops)
    scan = watched.push(text)
    if scan.stopped:
        return
    held = text[len(scan.text) :]
    may_grow = any(stop.startswith(held[i:]) for stop in stops for i in range(len(held)))
    assert not held or may_grow


def test_text_passes_at_once_when_it_cannot_become_a_stop() -> None:
    watched = StopStrings(["END"])
    assert watched.push("hello").text == "hello"
    assert watched.push(" E").text == " "
    assert watched.push("x").text == "Ex"


def test_a_stop_across_many_pieces_is_never_shown() -> None:
    watched = StopStrings(["<stop>"])
    scans = [watched.push(character) for character in "ab<stop>"]
    assert [scan.text for scan in scans] == ["a", "b", "", "", "", "", "", ""]
    assert scans[-1].stopped
