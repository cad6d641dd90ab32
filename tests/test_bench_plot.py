"""The picture of a load: what is in it, and what is refused before a load is run for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.latency import LoadResult, RequestRecord
from cluster.bench.plot import check_plot, draw, most_open_per_bin, time_bins, tokens_per_bin
from cluster.cli import main
from planner.errors import InvalidConfiguration


def record(sent: float, num_tokens: int, gap: float = 0.01) -> RequestRecord:
    events = tuple(sent + 0.1 + gap * index for index in range(num_tokens))
    return RequestRecord(sent, events[-1] + 0.001, 5, num_tokens, events)


def load_of(*records: RequestRecord) -> LoadResult:
    return LoadResult(records, max(r.ended for r in records) - min(r.sent for r in records))


@pytest.mark.parametrize(("suffix", "begin"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_picture_of_each_kind_is_drawn(tmp_path: Path, suffix: str, begin: bytes) -> None:
    path = tmp_path / f"load{suffix}"
    draw(load_of(*(record(10 + at / 5, 20) for at in range(20))), path, "tiny", {"ttft": 150.0})
    assert path.read_bytes().startswith(begin)
    assert path.stat().st_size > 5_000


def test_the_picture_says_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "load.svg"
    draw(load_of(record(0, 5), record(1, 1)), path, "tiny: 2 requests", {"ttft": 150.0, "e2el": 9.0})
    comments = path.read_text()
    for words in ("tiny: 2 requests", "Time to first token", "p99 100.0 ms", "limit 150 ms", "Tokens a second"):
        assert f"<!-- {words} -->" in comments
    assert "limit 9 ms" not in comments


def test_a_load_of_single_tokens_has_no_gaps_and_is_drawn_all_the_same(tmp_path: Path) -> None:
    draw(load_of(record(0, 1)), tmp_path / "one.png", "one")
    assert (tmp_path / "one.png").is_file()


def test_a_load_that_failed_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="no request succeeded"):
        draw(load_of(RequestRecord(0, 1, 5, error="x")), tmp_path / "none.png", "none")
    assert not (tmp_path / "none.png").exists()


TIMES = st.tuples(st.floats(0, 50), st.integers(1, 30), st.floats(0.001, 0.5))


@given(st.lists(TIMES, min_size=1, max_size=20))
def test_no_token_is_lost_between_the_bins(drawn: list[tuple[float, int, float]]) -> None:
    result = load_of(*(record(*one) for one in drawn))
    counts = tokens_per_bin(result.records, time_bins(result))
    assert counts.sum() == pytest.approx(sum(num_tokens for _, num_tokens, _ in drawn))


@given(st.lists(TIMES, min_size=1, max_size=20))
def test_the_most_in_flight_is_what_counting_at_every_moment_gives(drawn: list[tuple[float, int, float]]) -> None:
    result = load_of(*(record(*one) for one in drawn))
    edges = time_bins(result)
    most = most_open_per_bin(result.records, edges)
    start = min(r.sent for r in result.records)
    for at in [r.sent for r in result.records]:
        open_then = sum(r.sent <= at < r.ended for r in result.records)
        index = min(int(np.searchsorted(edges, at - start, side="right")) - 1, len(most) - 1)
        assert most[index] >= open_then
    assert most.max() <= len(drawn)


def test_in_flight_by_hand() -> None:
    records = [RequestRecord(0.0, 1.0, 1), RequestRecord(0.5, 3.0, 1)]
    assert most_open_per_bin(records, np.asarray([0.0, 1.0, 2.0, 3.0, 4.0])).tolist() == [2, 1, 1, 0]


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match=r"raycomb\[plot\]") as told:
        check_plot(tmp_path / "load.png", find=lambda _name: None)
    assert told.value.param == "plot"


@pytest.mark.parametrize("name", ["load.txt", "load", "nowhere/load.png"])
def test_what_cannot_be_drawn_is_refused_before_anything_is_sent(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "online", "--model", "m", "--base-url", "http://127.0.0.1:9", "--plot", str(tmp_path / name)]
    assert main(words) == 2
    assert "--plot" in capsys.readouterr().err
