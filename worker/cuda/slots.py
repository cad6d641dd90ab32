"""Which sequence lives in which slot of the decode state. Integers only; the slots' contents are `decode_state`'s."""

from __future__ import annotations

from collections.abc import Iterable

from planner.request import SamplingParams


class Slots:
    """Owner: the executor. A sequence takes a slot when it first draws a token, and keeps it until it is dropped."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._taken: dict[int, int] = {}
        self._random: set[int] = set()
        self._needing_logits: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def find(self, sequence_id: int) -> int | None:
        """The sequence's slot, if it has one."""
        return self._taken.get(sequence_id)

    def of(self, sequence_id: int) -> int:
        """The slot of a sequence that has one, as all do that drew a token only the device knows."""
        return self._taken[sequence_id]

    def take(self, sequence_id: int, sampling: SamplingParams) -> int:
        """A slot for a sequence that has none. The planner's limits see to it that there is one."""
        assert sequence_id not in self._taken, f"sequence {sequence_id} has a slot already"
        slot = self._taken[sequence_id] = self._free.pop()
        if not sampling.greedy:
            self._random.add(slot)
        if needs_logits(sampling):
            self._needing_logits.add(slot)
        return slot

    def drop(self, sequence_ids: Iterable[int]) -> None:
        """Free the slots of these sequences; those without one are passed over."""
        for sequence_id in sequence_ids:
            slot = self._taken.pop(sequence_id, None)
            if slot is not None:
                self._free.append(slot)
                self._random.discard(slot)
                self._needing_logits.discard(slot)

    def any_random(self, slots: Iterable[int]) -> bool:
        """Whether any of these slots' sequences draws at random."""
        return not self._random.isdisjoint(slots)

    def needing_logits(self, slots: Iterable[int]) -> list[int]:
        """Places in `slots` whose sequences want more than the device draws by itself."""
        if not self._needing_logits:
            return []
        return [place for place, slot in enumerate(slots) if slot in self._needing_logits]


def needs_logits(sampling: SamplingParams) -> bool:
    """Whether log probabilities are wanted, or logits are changed before the draw: the host sees to both."""
    wants_logits = sampling.logprobs is not None or sampling.grammar is not None
    return wants_logits or bool(sampling.logit_bias) or sampling.needs_history


def slots_needed(max_num_seqs: int) -> int:
    """Slots for a planner that runs at most so many sequences: a sequence that ended while a later step holds it gives
    its place to another one before it is dropped, so for one step there may be two for each place."""
    return 2 * max_num_seqs
