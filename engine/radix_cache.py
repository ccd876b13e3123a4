"""The prefix cache: a radix tree over whole KV pages, reference-counted, evicting the least recently used.

An edge holds a run of pages and the tokens in them; nodes part only at page boundaries. The tree knows page
numbers, not memory: whoever inserts gives the pages to it, and `evict` and `reset` give them back.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_TOKEN_BYTES = 8


class RadixNode:
    """A run of pages below its parent. Opaque outside this file.

    An object keeps standing for the same last page as long as it is in the tree: a split puts a new node
    above it. So a lock taken on a node still covers the whole path when it is released."""

    __slots__ = ("children", "in_heap", "key", "last_used", "locks", "pages", "parent", "serial")

    def __init__(self, parent: RadixNode | None, key: bytes, pages: list[int], serial: int) -> None:
        self.parent = parent
        self.key = key
        """The tokens of the run, 8 bytes each: comparing them is one memcmp at any page size."""
        self.pages = pages
        self.children: dict[bytes, RadixNode] = {}
        """By the tokens of the child's first page."""
        self.locks = 0
        self.last_used = 0
        self.serial = serial
        self.in_heap = False


class PrefixMatch(NamedTuple):
    pages: list[int]
    """The pages of the longest cached prefix, in order."""
    num_tokens: int
    node: RadixNode
    """To `lock` before anything may evict, and to `unlock` with."""


class InsertResult(NamedTuple):
    duplicates: list[int]
    """Pages of the caller whose tokens are cached under another page: they stay the caller's."""
    num_new_pages: int
    """Pages that are the cache's from now on."""
    node: RadixNode
    """The end of the inserted path."""


class RadixCache:
    """A disabled cache finds nothing and takes nothing, so callers need no second code path."""

    def __init__(self, page_size: int, *, enabled: bool = True) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self.enabled = enabled
        self._page_bytes = page_size * _TOKEN_BYTES
        self._clock = 0
        self._serials = itertools.count(1)
        self._root = RadixNode(None, b"", [], 0)
        self._cached = 0
        self._locked = 0
        # Every unlocked leaf has one entry (last use when entered, serial, node); other entries are stale
        # and dropped or renewed when they come up.
        self._heap: list[tuple[int, int, RadixNode]] = []

    @property
    def cached_pages(self) -> int:
        return self._cached

    @property
    def evictable_pages(self) -> int:
        """Cached pages on no locked path; `evict` can free all of them."""
        return self._cached - self._locked

    def match(self, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix in whole pages. Counts as a use of those pages."""
        if not self.enabled:
            return PrefixMatch([], 0, self._root)
        path = self._walk(self._key_of(token_ids))
        pages = _pages_of(path)
        return PrefixMatch(pages, len(pages) * self.page_size, path[-1] if path else self._root)

    def lock(self, node: RadixNode) -> None:
        """Keep the path down to `node` from eviction until `unlock`. Locks add up. Raises ValueError if the
        node was evicted since it was returned."""
        for step in self._path_up(node):
            if step.locks == 0:
                self._locked += len(step.pages)
            step.locks += 1

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock` of this node. Raises ValueError if there is none."""
        path = list(self._path_up(node))
        if any(step.locks < 1 for step in path):
            raise ValueError("unlock of a prefix that is not locked")
        for step in path:
            step.locks -= 1
            if step.locks == 0:
                self._locked -= len(step.pages)
                self._enter_heap(step)

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> InsertResult:
        """Offer pages: `pages[i]` holds the KV of tokens `[i * page_size, (i + 1) * page_size)`. Tokens past
        the last whole page are ignored. The cache takes those it has no page for; a page that it already
        holds for the same tokens (from an earlier match) is neither new nor a duplicate. Counts as a use.
        Raises ValueError unless there is one page for each whole page of tokens."""
        num_pages = len(token_ids) // self.page_size
        if len(pages) != num_pages:
            raise ValueError(f"{len(pages)} pages for {num_pages} whole pages of tokens")
        if not self.enabled:
            return InsertResult(list(pages), 0, self._root)
        key = self._key_of(token_ids)
        path = self._walk(key)
        known = _pages_of(path)
        brought = list(pages[: len(known)])
        duplicates = [p for p, c in zip(brought, known, strict=True) if p != c] if brought != known else []
        end = path[-1] if path else self._root
        new = list(pages[len(known) :])
        if new:
            end = self._add_leaf(end, key[len(known) * self._page_bytes :], new)
        return InsertResult(duplicates, len(new), end)

    def evict(self, num_pages: int) -> list[int]:
        """Let go of `num_pages` pages, or of all evictable ones if there are fewer: the ends of the least
        recently used unlocked branches, page by page. Returns their numbers."""
        freed: list[int] = []
        while len(freed) < num_pages and self._heap:
            entered, _, leaf = heapq.heappop(self._heap)
            leaf.in_heap = False
            if leaf.locks or leaf.children:
                continue  # enters again when it is unlocked or its last child goes
            if leaf.last_used != entered:
                self._enter_heap(leaf)
                continue
            excess = len(leaf.pages) - (num_pages - len(freed))
            if excess > 0:
                self._split(leaf, excess)
            freed += reversed(leaf.pages)
            self._remove(leaf)
        return freed

    def reset(self) -> list[int]:
        """Let go of everything; returns all page numbers. Raises RuntimeError, and drops nothing, while any
        path is locked."""
        if self._locked:
            raise RuntimeError(f"{self._locked} cached pages are in use")
        pages: list[int] = []
        for node in list(self._nodes()):
            pages += node.pages
            node.parent = None
        self._root.children = {}
        self._heap = []
        self._cached = 0
        return pages

    def check(self) -> None:
        """Raises AssertionError if the counters, the locks or the tree's shape contradict each other."""
        pages: list[int] = []
        locked = 0
        entries = {id(node) for _, _, node in self._heap}
        assert len(entries) == len(self._heap), "a node is in the eviction heap twice"
        for node in self._nodes():
            assert node.parent is not None
            assert node.pages, "a node without pages"
            assert len(node.key) == len(node.pages) * self._page_bytes, "tokens and pages of a node differ"
            assert node.parent.children.get(node.key[: self._page_bytes]) is node, "a child under a wrong key"
            assert node.locks >= max((c.locks for c in node.children.values()), default=0), (
                "a locked prefix below an unlocked one"
            )
            assert node.last_used >= max((c.last_used for c in node.children.values()), default=0)
            assert node.in_heap == (id(node) in entries)
            assert node.in_heap or node.locks or node.children, "an unlocked leaf that eviction can't find"
            pages += node.pages
            locked += len(node.pages) if node.locks else 0
        assert len(set(pages)) == len(pages), "a page is cached twice"
        assert len(pages) == self._cached, f"{len(pages)} pages in the tree, counted {self._cached}"
        assert locked == self._locked, f"{locked} locked pages in the tree, counted {self._locked}"

    def _key_of(self, token_ids: Sequence[int]) -> bytes:
        whole = len(token_ids) // self.page_size * self.page_size
        return array("q", token_ids[:whole]).tobytes()

    def _walk(self, key: bytes) -> list[RadixNode]:
        """The nodes of the longest cached prefix of `key`, marked as used now. A node that goes further is
        split where the prefix ends, so that locks and use cover exactly the prefix."""
        self._clock += 1
        path: list[RadixNode] = []
        node, offset = self._root, 0
        while offset < len(key):
            child = node.children.get(key[offset : offset + self._page_bytes])
            if child is None:
                break
            common = self._common_pages(child, key, offset)
            if common < len(child.pages):
                child = self._split(child, common)
            child.last_used = self._clock
            path.append(child)
            offset += len(child.key)
            node = child
        return path

    def _common_pages(self, node: RadixNode, key: bytes, offset: int) -> int:
        """How many pages of `node` the tokens from `offset` on agree with; the first is known to."""
        if key.startswith(node.key, offset):
            return len(node.pages)
        low, high = 1, min(len(node.pages), (len(key) - offset) // self._page_bytes) + 1
        while high - low > 1:  # pages before `low` agree; not all of those before `high` do
            middle = (low + high) // 2
            part = node.key[low * self._page_bytes : middle * self._page_bytes]
            if key.startswith(part, offset + low * self._page_bytes):
                low = middle
            else:
                high = middle
        return low

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Put the first `num_pages` pages of `node` into a new node above it, and return that."""
        assert node.parent is not None
        cut = num_pages * self._page_bytes
        upper = RadixNode(node.parent, node.key[:cut], node.pages[:num_pages], next(self._serials))
        upper.locks, upper.last_used = node.locks, node.last_used
        node.parent.children[node.key[: self._page_bytes]] = upper
        node.parent, node.key, node.pages = upper, node.key[cut:], node.pages[num_pages:]
        upper.children[node.key[: self._page_bytes]] = node
        return upper

    def _add_leaf(self, parent: RadixNode, key: bytes, pages: list[int]) -> RadixNode:
        leaf = RadixNode(parent, key, pages, next(self._serials))
        leaf.last_used = self._clock
        parent.children[key[: self._page_bytes]] = leaf
        self._cached += len(pages)
        self._enter_heap(leaf)
        return leaf

    def _remove(self, leaf: RadixNode) -> None:
        assert leaf.parent is not None
        parent, leaf.parent = leaf.parent, None
        del parent.children[leaf.key[: self._page_bytes]]
        self._cached -= len(leaf.pages)
        self._enter_heap(parent)

    def _enter_heap(self, node: RadixNode) -> None:
        """Make a node known to eviction if it is an unlocked leaf and not known already."""
        if node is not self._root and not (node.locks or node.children or node.in_heap):
            node.in_heap = True
            heapq.heappush(self._heap, (node.last_used, node.serial, node))

    def _path_up(self, node: RadixNode) -> Iterator[RadixNode]:
        """`node` and its ancestors below the root."""
        step: RadixNode | None = node
        while step is not None and step is not self._root:
            if step.parent is None:
                raise ValueError("this prefix was evicted")
            yield step
            step = step.parent

    def _nodes(self) -> Iterator[RadixNode]:
        """All nodes below the root, parents first."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _pages_of(path: list[RadixNode]) -> list[int]:
    pages: list[int] = []
    for node in path:
        pages += node.pages
    return pages
