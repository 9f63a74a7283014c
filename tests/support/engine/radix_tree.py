"""A prefix cache as a plain radix tree, to judge the scheduler's hits by.

A node is one full block of tokens after the blocks before it. Requests come one at a time and run to their end, so
there is nothing to schedule: a request holds the nodes that its prompt walks along, makes nodes of the blocks it fills,
and when it ends everything on its path was used just now.

With a capacity, a block that was never used is taken first, then the least recently used of those that nobody holds.
Only a leaf can go, so no node ever loses what stands before it, and of equal age the deepest goes. A block that no walk
can find, one that is not full or the older copy of a node, waits for its turn like the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from support.engine.plain_lists import PlainLists

# The number of the request that used a block last, and minus its depth: the smallest goes first.
Age = tuple[int, int]


@dataclass(eq=False)
class Node:
    """One cached block. A node without a parent is the root and no block."""

    parent: Node | None = None
    age: Age = (0, 0)
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)


class RadixTree:
    """`capacity` blocks of `block_size` tokens; None: as many as it takes."""

    def __init__(self, block_size: int, capacity: int | None = None) -> None:
        self.block_size = block_size
        self.capacity = capacity
        self.root = Node()
        self.nodes: list[Node] = []
        # Ages of the blocks that no walk can find.
        self.nameless: list[Age] = []
        self.evictions = 0
        self.requests = 0

    def walk(self, tokens: list[int]) -> list[Node]:
        """Nodes of the leading full blocks of `tokens`, as far as there are any."""
        path: list[Node] = []
        node = self.root
        for block in self._full_blocks(tokens):
            if block not in node.children:
                break
            node = node.children[block]
            path.append(node)
        return path

    def serve(self, prompt: list[int], output: list[int]) -> int:
        """One request from first to last; returns how many tokens of its prompt were cached.

        One token of the prompt is computed at least. The last token of the output is sampled, not computed.
        """
        size = self.block_size
        computed = [*prompt, *output[:-1]]
        hits = self.walk(prompt)[: (len(prompt) - 1) // size]
        own = range(len(hits), -(-len(computed) // size))
        for taken, _ in enumerate(own):
            self._take(hits, taken)
        self.requests += 1
        made = self._enter(computed)
        path = self.walk(computed)
        for depth in own:
            if depth not in made:
                # A block that is not full, or another copy of a node: then it is the older one that has no name now.
                self.nameless.append(path[depth].age if depth < len(path) else (self.requests, -depth))
        for depth, node in enumerate(path):
            node.age = (self.requests, -depth)
        return len(hits) * size

    def _full_blocks(self, tokens: list[int]) -> list[tuple[int, ...]]:
        size = self.block_size
        return [tuple(tokens[end - size : end]) for end in range(size, len(tokens) + 1, size)]

    def _enter(self, tokens: list[int]) -> list[int]:
        """Makes the nodes that the full blocks of `tokens` still miss; returns their depths."""
        made: list[int] = []
        node = self.root
        for depth, block in enumerate(self._full_blocks(tokens)):
            if block not in node.children:
                node.children[block] = Node(node)
                self.nodes.append(node.children[block])
                made.append(depth)
            node = node.children[block]
        return made

    def _take(self, held: list[Node], taken: int) -> None:
        """Takes a block for a request that holds these nodes and has taken so many already."""
        if self.capacity is None or len(self.nodes) + len(self.nameless) + taken < self.capacity:
            return
        leaves = [node for node in self.nodes if not node.children and node not in held]
        leaf = min(leaves, key=lambda node: node.age, default=None)
        if self.nameless and (leaf is None or min(self.nameless) < leaf.age):
            self.nameless.remove(min(self.nameless))
            return
        assert leaf is not None, "the request alone does not fit"
        assert leaf.parent is not None
        siblings = leaf.parent.children
        del siblings[next(block for block, node in siblings.items() if node is leaf)]
        self.nodes.remove(leaf)
        self.evictions += 1


@dataclass(eq=False)
class SegmentedTree:
    """The same tree over the blocks of a pool whose free ones stand in the order of segmented LRU. For histories in
    which nothing is computed twice: every prompt ends with a token of its own.
    """

    block_size: int
    order: PlainLists
    root: dict[tuple[int, ...], SegmentedNode] = field(default_factory=dict)
    # By block, the place where it stands: the children of its parent, and its tokens there.
    places: dict[int, tuple[dict[tuple[int, ...], SegmentedNode], tuple[int, ...]]] = field(default_factory=dict)
    evictions: int = 0

    def serve(self, prompt: list[int], output: list[int]) -> int:
        """One request from first to last; returns how many tokens of its prompt were cached, as RadixTree does."""
        size = self.block_size
        computed = [*prompt, *output[:-1]]
        chunks = [tuple(computed[end - size : end]) for end in range(size, len(computed) + 1, size)]
        children, blocks = self.root, list[int]()
        while len(blocks) < (len(prompt) - 1) // size and chunks[len(blocks)] in children:
            node = children[chunks[len(blocks)]]
            blocks.append(node.block)
            children = node.children
        hits = len(blocks)
        free = {*self.order.probation, *self.order.protected}
        self.order.remove([block for block in blocks if block in free])
        self.order.hit(blocks)
        for _ in range(-(-len(computed) // size) - hits):
            blocks += self._take()
        for chunk, block in zip(chunks[hits:], blocks[hits:], strict=False):
            children[chunk] = SegmentedNode(block)
            self.places[block] = children, chunk
            children = children[chunk].children
        self.order.append(blocks[::-1])
        return hits * size

    def _take(self) -> list[int]:
        """The block that goes next; what it held leaves the tree, and must have been a leaf."""
        (block,) = self.order.pop(1)
        if block in self.places:
            siblings, chunk = self.places.pop(block)
            assert not siblings.pop(chunk).children, "a chain has a hole before its tail"
            self.evictions += 1
        return [block]


@dataclass(eq=False)
class SegmentedNode:
    """One cached block of a SegmentedTree, and those that follow it by their tokens."""

    block: int
    children: dict[tuple[int, ...], SegmentedNode] = field(default_factory=dict)
