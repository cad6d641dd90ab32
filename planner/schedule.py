"""Who waits, who runs, and who gets how many tokens of the next step."""

from __future__ import annotations

from planner.draft import Draft
from planner.limits import Limits
from planner.memory import Memory
from planner.metrics import Metrics
from planner.move import Move, MoveKind
from planner.request import Request
from planner.rotation import Rotation
from planner.sequence import Account, Sequence
from planner.waiting import WaitingQueue


class Schedule:
    """Owner of the order of sequences: waiting ones by priority, tenant and arrival, running ones by admission.

    A running sequence prefills until the last known token is planned; then it decodes. Those that prefill take turns.
    One that decodes feeds one token a step, or at once all that its grammar has forced.
    Tenants share twice, and each time by what they got of it: the seats that waiting sequences wait for, charged with
    all tokens, and the prefill tokens of a step.
    """

    def __init__(self, limits: Limits, memory: Memory, metrics: Metrics) -> None:
        self.waiting = WaitingQueue(limits.tenant_weights)
        self.moves: list[Move] = []  # until they are taken
        self._limits = limits
        self._memory = memory
        self._metrics = metrics
        self._running: dict[Sequence, None] = {}  # in admission order
        self._rotation = Rotation(limits.prefill_chunk_tokens, limits.tenant_weights)  # those that prefill
        self._forced: set[Sequence] = set()  # of those that decode

    @property
    def busy(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self._running)

    @property
    def num_running(self) -> int:
        """Running sequences, those included that will fork from one that runs."""
        leaders = [sequence for sequence in self._running if sequence.family.leader is sequence]
        return len(self._running) + sum(len(leader.family.unforked) for leader in leaders)

    @property
    def num_to_prefill(self) -> int:
        """Tokens of running sequences that no step has fed yet; their cells are spoken for."""
        return self._rotation.num_tokens

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that are still to be prefilled, of waiting and running sequences."""
        return self.waiting.num_tokens + self.num_to_prefill

    def tokens_before(self, request: Request) -> int:
        """Tokens to prefill before the first turn of a request that came now: an estimate, and rather too few."""
        return self.waiting.tokens_before(request) + self._rotation.tokens_before(request)

    def run_fork(self, sequence: Sequence) -> None:
        """A sequence just forked from a running one: it decodes from the start, in the slot kept for it."""
        self._running[sequence] = None

    def feed_at_once(self, sequence: Sequence) -> None:
        """A sequence that decodes knows several tokens that no step has fed."""
        if sequence.num_to_feed > 1:
            self._forced.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, whether it waits or runs."""
        if sequence in self._running:
            del self._running[sequence]
            self._rotation.discard(sequence)
            self._forced.discard(sequence)
        else:
            self.waiting.remove(sequence)

    @property
    def sequences(self) -> list[Sequence]:
        """All that wait or run."""
        return [*self.waiting, *self._running]

    def draft(self, *, in_flight: bool) -> Draft:
        """Decide the next step: decodes first, then admission, then prefills.

        With a step in flight nobody is preempted; a draft that would need it says `must_commit`.
        """
        draft = Draft(may_preempt=not in_flight)
        self._draft_decodes(draft)
        if not draft.must_commit:
            self._admit(draft)
            self._draft_prefills(draft)
        return draft

    def advance(self, draft: Draft) -> None:
        """The draft was packed: who prefilled goes to the back of the rotation, who has no more to prefill decodes.

        Decodes are charged to their tenants; the prompts behind them were when they were admitted.
        """
        prefilling = self._rotation.sequences
        self._forced.difference_update(draft.takes)
        somebody_waits = len(self.waiting) > 0
        decoded: dict[Account, int] = {}
        for sequence, num_tokens in draft.takes.items():
            if sequence in prefilling:
                self._rotation.advance(sequence, num_tokens)
            elif somebody_waits:
                account = sequence.family.account
                decoded[account] = decoded.get(account, 0) + num_tokens
        for account, num_tokens in decoded.items():
            self.waiting.charge(account, num_tokens)

    def check(self) -> None:
        """Verify every invariant; for tests and debugging."""
        assert self.num_running <= self._limits.max_num_seqs, "more sequences run than may"
        prefilling = self._rotation.sequences
        assert prefilling <= self._running.keys(), "a sequence prefills without running"
        assert all(sequence.num_to_feed > 0 for sequence in prefilling), "a sequence prefills nothing"
        assert self._forced <= self._running.keys() - prefilling, "a sequence that does not decode has forced tokens"
        ahead = {sequence for sequence in self._running.keys() - prefilling if sequence.num_to_feed > 1}
        assert self._forced == ahead, "forced tokens are not fed at once"
        assert all(sequence.cells_id is not None for sequence in self._running), "a sequence runs without cells"
        assert all(sequence not in self.waiting for sequence in self._running), "a sequence waits and runs"

    def _draft_decodes(self, draft: Draft) -> None:
        prefilling = self._rotation.sequences
        decoding = [sequence for sequence in self._running if sequence not in prefilling and sequence.can_decode]
        if not self._forced and draft.num_tokens + len(decoding) <= self._memory.room:
            draft.take_one_each(decoding)
            return
        spare = self._limits.most_forced
        for sequence in decoding:
            num_forced = sequence.num_to_feed - 1 if sequence in self._forced else 0
            if num_forced > spare:
                continue  # older ones have had theirs, and so it comes to be the oldest
            if sequence in self._running and self._find_room(sequence, draft, 1 + num_forced):
                draft.take(sequence, 1 + num_forced)
                spare -= num_forced

    def _admit(self, draft: Draft) -> None:
        """Start waiting sequences, strictly in order: one that does not fit is not overtaken."""
        while self.waiting and (seats := self._limits.max_num_seqs - self.num_running) > 0:
            head = self.waiting.head
            if head.num_slots > seats:
                return
            promised = draft.num_tokens + self.num_to_prefill
            is_first = head.family.num_cached_tokens is None
            if not self._memory.admit(head, promised, certain=not self._running):
                return
            self.waiting.admit(head)
            self._running[head] = None
            self._rotation.add(head)
            kind = MoveKind.ADMITTED if is_first else MoveKind.RESUMED
            self.moves.append(Move(head.family.request_id, kind))

    def _draft_prefills(self, draft: Draft) -> None:
        """Turns of at most `prefill_chunk_tokens`, in passes over the rotation while the budget lasts."""
        in_turn = self._rotation.turns()
        served = True
        while served:
            served = False
            for sequence in in_turn:
                served = self._take_turn(sequence, draft) or served

    def _take_turn(self, sequence: Sequence, draft: Draft) -> bool:
        left = sequence.num_to_feed - draft.takes.get(sequence, 0)
        budget = self._limits.max_batched_tokens - draft.num_tokens
        length = min(self._limits.prefill_chunk_tokens, left, budget)
        if length == 0 or sequence not in self._rotation.sequences or not self._find_room(sequence, draft):
            return False
        draft.take(sequence, min(length, self._memory.room - draft.num_tokens))
        return True

    def _find_room(self, sequence: Sequence, draft: Draft, num_tokens: int = 1) -> bool:
        """Whether there is room for so many tokens more, after newer sequences than this one have given way."""
        while self._memory.room < draft.num_tokens + num_tokens:
            newest = max(self._running, key=lambda running: running.order)
            if newest is sequence:
                return False  # it stays where it is; whoever is older takes its cells when it needs them
            if not draft.may_preempt:
                draft.must_commit = True
                return False
            draft.drop(newest)
            self._preempt(newest)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._metrics.num_preemptions += 1
        self.moves.append(Move(sequence.family.request_id, MoveKind.PREEMPTED))
        self._memory.preempt(sequence)
        self.remove(sequence)
        self.waiting.add(sequence)
