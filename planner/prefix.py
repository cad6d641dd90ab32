"""The prefix index: which token prefixes have their keys and values in the pool, token for token.

Radix trees over token ids (the idea of SGLang's RadixAttention; Zheng et al. 2024), one cell a token, and one tree for
each root: what was computed with different adapters is never shared, however equal its tokens. The index only refers
to cells; who owns them is the cell table's business. It never hears of tokens that are not yet written. What it knows
is told to others by name (`planner.blocks`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from planner.blocks import BLOCK_TOKENS, ResidentBlocks, block_hashes
from planner.cells import CellTable
from planner.request import BASE_ROOT, CellArray, TokenArray


@dataclass(slots=True, eq=False)
class _Node:
    """An edge of the tree and its lower end: int64[n] tokens and the int32[n] cells that hold them.

    `start` is the position of its first token; `blocks` are the names of the blocks that end in it; `root` is the name
    of the empty prefix at the top of its tree.
    """

    tokens: TokenArray
    cells: CellArray
    parent: _Node | None
    start: int = 0
    blocks: list[int] = field(default_factory=list)
    root: int = BASE_ROOT
    children: dict[int, _Node] = field(default_factory=dict)
    last_used: int = 0
    queued: bool = False

    def num_blocks(self, length: int) -> int:
        """Number of blocks that end in its first `length` tokens."""
        return (self.start + length) // BLOCK_TOKENS - self.start // BLOCK_TOKENS


class PrefixIndex:
    """Bounded by the pool: each node refers to at least one cell, each cell belongs to at most one node.

    Recency is a logical counter. Every leaf is queued once for eviction by a recency that may be older than its own,
    and is put back when that turns out; so no verb walks the whole tree.

    `blocks` holds the names of all whole blocks of the tree, as far as its own bound allows.
    """

    def __init__(self, table: CellTable, *, enabled: bool = True) -> None:
        self.blocks = ResidentBlocks()
        self._table = table
        self._enabled = enabled
        self._now = 0
        self._num_queued = 0
        self._roots: dict[int, _Node] = {}  # of trees that hold anything
        self._leaves: list[tuple[int, int, _Node]] = []  # a heap of (recency when queued, order of queueing, leaf)

    def match(self, tokens: TokenArray, root: int = BASE_ROOT) -> CellArray:
        """Cells int32[k] of the longest prefix that is resident below `root`, k <= len(tokens) - 1, and mark it as just
        used.

        The last token is always left to compute, since its logits are wanted.
        """
        cells = [np.empty(0, np.int32)]
        self._now += 1
        at = 0
        if (node := self._roots.get(root)) is None:
            return cells[0]
        while at < len(tokens) - 1 and (child := node.children.get(int(tokens[at]))) is not None:
            common = _num_common(child.tokens, tokens[at:-1])
            child.last_used = self._now
            cells.append(child.cells[:common])
            at += common
            if common < len(child.tokens):
                break
            node = child
        return np.concatenate(cells)

    def insert(self, tokens: TokenArray, cells: CellArray, root: int = BASE_ROOT) -> None:
        """Make int64[n] tokens known below `root`, that a sequence has committed to int32[n] cells of its own.

        What is known already keeps its cells; of `cells` only the rest is retained.
        """
        if not self._enabled or not len(tokens):
            return
        self._now += 1
        top = self._roots.get(root) or _Node(np.empty(0, np.int64), np.empty(0, np.int32), None, root=root)
        self._roots[root] = top
        node, at, last_block = top, 0, root
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                self._table.retain(cells[at:])
                names = block_hashes(tokens[at // BLOCK_TOKENS * BLOCK_TOKENS :], last_block)
                leaf = _Node(tokens[at:].copy(), cells[at:].copy(), node, at, names, root, last_used=self._now)
                self._attach(leaf, node)
                return
            common = _num_common(child.tokens, tokens[at:])
            node = child if common == len(child.tokens) else self._split(child, common)
            node.last_used = self._now
            last_block = node.blocks[-1] if node.blocks else last_block
            at += common

    def evict(self, num_cells: int) -> int:
        """Free up to `num_cells` cached cells, of the least recently used leaves first and from a leaf's end.

        Returns how many were freed: as many as asked for, or all there were. Never frees a cell that a sequence owns;
        but where such cells hang below cached ones (two sequences computed one prefix at the same time) the index
        forgets the owned ones to reach the others.
        """
        before = self._table.cached
        target = max(0, before - num_cells)
        self._free_ends(target)
        while self._table.cached > target:
            self._forget_owned_end()
            self._free_ends(target)
        return before - self._table.cached

    def clear(self) -> None:
        """Forget everything; what no sequence owns becomes free."""
        for node in self._nodes():
            self._table.forget(node.cells)
            self.blocks.remove(node.blocks)
        self._roots.clear()
        self._leaves.clear()

    def check(self) -> None:
        """Verify every invariant, in O(cells); for tests and debugging."""
        queued = [node for _, _, node in self._leaves]
        assert len(set(queued)) == len(queued), "a leaf is queued twice"
        for node in self._nodes():
            assert len(node.tokens) == len(node.cells) > 0, "a node without a cell for each token"
            assert node.parent is not None, "a node that hangs nowhere"
            assert node.parent.children[int(node.tokens[0])] is node, "a child under another token"
            assert node.children or node in queued, "a leaf that eviction cannot find"
            assert node.queued == (node in queued), "a wrong mark of queueing"
            assert node.start == node.parent.start + len(node.parent.tokens), "a node at a wrong position"
            names = block_hashes(self._path(node), node.root)
            assert node.blocks == names[len(names) - node.num_blocks(len(node.tokens)) :], "misnamed blocks"

    @staticmethod
    def _path(node: _Node) -> TokenArray:
        parts = []
        above: _Node | None = node
        while above is not None:
            parts.append(above.tokens)
            above = above.parent
        return np.concatenate(parts[::-1])

    def _nodes(self) -> list[_Node]:
        nodes = [child for top in self._roots.values() for child in top.children.values()]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes

    def _attach(self, leaf: _Node, parent: _Node) -> None:
        parent.children[int(leaf.tokens[0])] = leaf
        self.blocks.add(leaf.blocks)
        self._queue(leaf)

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut a node after `length` tokens; returns the upper part."""
        assert node.parent is not None
        num_blocks = node.num_blocks(length)
        upper = _Node(
            tokens=node.tokens[:length].copy(),
            cells=node.cells[:length].copy(),
            parent=node.parent,
            start=node.start,
            blocks=node.blocks[:num_blocks],
            root=node.root,
            last_used=node.last_used,
        )
        node.parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.cells, node.parent = node.tokens[length:].copy(), node.cells[length:].copy(), upper
        node.start, node.blocks = node.start + length, node.blocks[num_blocks:]
        upper.children[int(node.tokens[0])] = node
        return upper

    def _queue(self, leaf: _Node) -> None:
        leaf.queued = True
        self._num_queued += 1
        heapq.heappush(self._leaves, (leaf.last_used, self._num_queued, leaf))

    def _pop_leaf(self) -> _Node | None:
        """Take the least recently used leaf off the queue."""
        while self._leaves:
            recency, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.children:
                continue  # no leaf any more; it is queued again when its last child goes
            if recency == node.last_used:
                return node
            self._queue(node)
        return None

    def _free_ends(self, target: int) -> None:
        """Trim unowned cells off the ends of leaves until only `target` cells are cached, or none can be trimmed."""
        owned_to_the_end = []
        while self._table.cached > target and (leaf := self._pop_leaf()) is not None:
            owned = np.flatnonzero(~self._table.unowned(leaf.cells))
            start = int(owned[-1]) + 1 if len(owned) else 0
            self._trim(leaf, max(start, len(leaf.cells) - (self._table.cached - target)))
            if len(leaf.cells):
                owned_to_the_end.append(leaf)
        for leaf in owned_to_the_end:
            self._queue(leaf)

    def _forget_owned_end(self) -> None:
        """Forget the owned end of the least recently used leaf that has a cached cell above it."""
        passed: list[_Node] = []
        while not passed or not self._hides_cached(passed[-1]):
            leaf = self._pop_leaf()
            assert leaf is not None, "a cached cell that no leaf is below"
            passed.append(leaf)
        unowned = np.flatnonzero(self._table.unowned(passed[-1].cells))
        self._trim(passed[-1], int(unowned[-1]) + 1 if len(unowned) else 0)
        for leaf in passed:
            if len(leaf.cells):
                self._queue(leaf)

    def _hides_cached(self, leaf: _Node) -> bool:
        node: _Node | None = leaf
        while node is not None:
            if self._table.unowned(node.cells).any():
                return True
            node = node.parent
        return False

    def _trim(self, leaf: _Node, length: int) -> None:
        """Keep a leaf's first `length` tokens; without any, take it off the tree."""
        first = int(leaf.tokens[0])
        self._table.forget(leaf.cells[length:])
        num_blocks = leaf.num_blocks(length)
        self.blocks.remove(leaf.blocks[num_blocks:])
        del leaf.blocks[num_blocks:]
        leaf.tokens, leaf.cells = leaf.tokens[:length], leaf.cells[:length]
        parent = leaf.parent
        if length or parent is None:
            return
        del parent.children[first]
        if parent.children:
            return
        if parent.parent is None:
            del self._roots[leaf.root]
        elif not parent.queued:
            self._queue(parent)


def _num_common(a: TokenArray, b: TokenArray) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
