"""An approximate radix tree: which workers have seen which beginnings of prompts.

Approximate, because a worker may since have evicted what it once computed; the router can't know. A wrong
guess costs a computed prompt, never a wrong answer.
"""

from __future__ import annotations

from collections import OrderedDict

from diptych.router.workers import Worker

NODE_BYTES = 800
"""What a node costs beside its label: objects, tables, its place in the order of use and a mark or two."""


class Node:
    """A stretch of bytes behind its parent's. A worker marked here is marked on the whole way up."""

    __slots__ = ("children", "label", "parent", "workers")

    def __init__(self, label: bytes, parent: Node | None) -> None:
        self.label = label
        self.parent = parent
        self.children: dict[int, Node] = {}
        """By the first byte of their labels."""
        self.workers: set[Worker] = set()

    @property
    def cost(self) -> int:
        """Bytes of memory, roughly."""
        return NODE_BYTES + len(self.label)


class PrefixTree:
    """Holds about `max_bytes`; what was used least recently goes first, a leaf at a time.

    All work is in comparisons of whole stretches of bytes: a prompt costs a few of them however long it is.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._root = Node(b"", None)
        # Least recently used first. Each walk refreshes a node after what is below it, so a node always
        # comes later than its children and the first is a leaf.
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._marked: dict[Worker, set[Node]] = {}
        self.size = 0
        """Bytes held, roughly."""

    def __len__(self) -> int:
        """How many nodes there are."""
        return len(self._order)

    def match(self, key: bytes) -> dict[Worker, int]:
        """How many bytes of the key's beginning each worker has seen; workers without any are left out."""
        seen: dict[Worker, int] = {}
        node, depth = self._root, 0
        while depth < len(key) and (child := node.children.get(key[depth])) is not None:
            common = _common(key, depth, child.label)
            depth += common
            for worker in child.workers:
                seen[worker] = depth
            if common < len(child.label):
                break
            node = child
        return seen

    def insert(self, key: bytes, worker: Worker) -> None:
        """`worker` sees this prompt."""
        path: list[Node] = []
        node, depth = self._root, 0
        while depth < len(key):
            child = node.children.get(key[depth])
            if child is None:
                child = self._attach(node, key[depth:])
                depth = len(key)
            else:
                common = _common(key, depth, child.label)
                if common < len(child.label):
                    child = self._split(child, common)
                depth += common
            path.append(child)
            node = child
        marked = self._marked.setdefault(worker, set())
        for passed in reversed(path):
            passed.workers.add(worker)
            marked.add(passed)
            self._order.move_to_end(passed)
        while self.size > self._max_bytes and self._order:
            self._drop_leaf(next(iter(self._order)))

    def remove(self, worker: Worker) -> None:
        """Forget what this worker has seen, and what then nobody has."""
        for node in self._marked.pop(worker, ()):
            node.workers.discard(worker)
            if not node.workers:
                # Nobody is marked below it either, so all below it goes in this loop too.
                self._forget(node)

    def _attach(self, parent: Node, label: bytes) -> Node:
        node = Node(label, parent)
        parent.children[label[0]] = node
        self._order[node] = None
        self.size += node.cost
        return node

    def _split(self, lower: Node, at: int) -> Node:
        """Cut a node in two; returns the upper one, which has the first `at` bytes."""
        parent = lower.parent
        assert parent is not None, "the root has no label to cut"
        upper = self._attach(parent, lower.label[:at])
        upper.children[lower.label[at]] = lower
        lower.label, lower.parent = lower.label[at:], upper
        self.size -= at
        upper.workers = set(lower.workers)
        for worker in upper.workers:
            self._marked[worker].add(upper)
        return upper

    def _drop_leaf(self, node: Node) -> None:
        assert not node.children, "a node is used whenever what is below it is"
        for worker in node.workers:
            self._marked[worker].discard(node)
        self._forget(node)

    def _forget(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.label[0]]
        del self._order[node]
        self.size -= node.cost


def _common(key: bytes, start: int, label: bytes) -> int:
    """How many bytes of `label` stand in `key` from `start` on."""
    if key.startswith(label, start):
        return len(label)
    # Halving the stretch that holds the first difference: each step is one comparison in C.
    low, high = 0, min(len(label), len(key) - start)
    while low < high:
        middle = (low + high + 1) // 2
        if key.startswith(label[low:middle], start + low):
            low = middle
        else:
            high = middle - 1
    return low
