"""A tree search by forks of sessions on a real model: the cells of its distinct tokens, and the texts of each alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cluster.sessions.histories import SessionLimits, Sessions
from planner.request import Request, SamplingParams
from tests.tiny_models import save_tiny_model
from tests.torch_rig import Rig, executor_of, load, request
from worker.torch_executor import TorchExecutor

DEPTH, WIDTH, NUM_TOKENS = 6, 4, 4
PROMPT = [int(token) for token in np.random.default_rng(5).integers(0, 97, size=60)]


class Search:
    """Keeps the best `WIDTH` histories of each level, and forks each of them `WIDTH` times for the next."""

    def __init__(self, rig: Rig[TorchExecutor]) -> None:
        self.rig = rig
        self.sessions = Sessions(SessionLimits(max_sessions=4096, max_per_account=4096, idle_s=600))
        self.histories: dict[str, list[int]] = {}
        self.asked: list[tuple[Request, list[int]]] = []
        self.most_cells = 0

    def extend(self, sessions: list[str], deltas: list[list[int]]) -> None:
        """All together, each behind its own words."""
        turns, requests = [], []
        for session, delta in zip(sessions, deltas, strict=True):
            turns.append(self.sessions.begin(session, "", delta, NUM_TOKENS, 256))
            sampling = SamplingParams(temperature=1.0, seed=1000 + len(self.asked) + len(turns))
            requests.append(request([*turns[-1].history, *delta], NUM_TOKENS, sampling))
        for session, turn, asked, said in zip(sessions, turns, requests, self.answer(requests), strict=True):
            self.asked.append((asked, said))
            self.histories[session] = [*asked.prompt.tolist(), *said]
            assert self.sessions.end(turn.turn_id, said, failed=False)

    def answer(self, requests: list[Request]) -> list[list[int]]:
        """Run them together, and note how many cells that took."""
        said: dict[int, list[int]] = {self.rig.planner.submit(asked): [] for asked in requests}
        while self.rig.planner.has_work:
            for update in self.rig.turn():
                said[update.request_id] += update.tokens
            snapshot = self.rig.planner.snapshot()
            self.most_cells = max(self.most_cells, snapshot.owned_cells + snapshot.cached_cells)
        return list(said.values())

    def run(self) -> list[list[int]]:
        """The history of every session of the tree."""
        root = self.sessions.open("").id
        self.extend([root], [PROMPT])
        level, tree = [root], [root]
        for depth in range(DEPTH):
            branches = [self.sessions.fork(parent, "", None).id for parent in level for _ in range(WIDTH)]
            self.extend(branches, [[depth, place % WIDTH] for place in range(len(branches))])
            tree += branches
            level = sorted(branches, key=lambda one: sum(self.histories[one][-NUM_TOKENS:]), reverse=True)[:WIDTH]
        assert all(self.sessions.get(one, "").position == len(self.histories[one]) - 1 for one in tree)
        return [self.histories[one] for one in tree]


def test_a_tree_search_takes_the_cells_of_its_distinct_tokens_and_says_what_each_says_alone(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    program = load(str(tmp_path))
    search = Search(Rig(executor_of(program, 2048)))
    tree = search.run()
    assert len(tree) == 1 + WIDTH + (DEPTH - 1) * WIDTH * WIDTH
    distinct = {tuple(history[: end + 1]) for history in tree for end in range(len(history) - 1)}
    assert search.most_cells < 1.1 * len(distinct)
    apart = sum(len(history) - 1 for history in tree)
    assert apart > 5 * search.most_cells, "without sharing it would be several times as many"
    said = [answer for _, answer in search.asked]
    unshared = Search(Rig(executor_of(program, 85 * 150), prefix_caching=False, max_num_seqs=100))
    assert unshared.answer([asked for asked, _ in search.asked]) == said
    assert unshared.answer([search.asked[-1][0]]) == said[-1:]
