"""The radix tree, beside a model of it that keeps every prompt whole."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.router.policies.prefix_tree import NODE_BYTES, PrefixTree
from diptych.router.workers import Worker, WorkerRole

WORKERS = [Worker(WorkerRole.PREFILL, f"http://w{i}:1") for i in range(3)]
A, B, C = WORKERS


def common(one, two):
    count = 0
    while count < min(len(one), len(two)) and one[count] == two[count]:
        count += 1
    return count


def nodes(tree):
    found, stack = [], [tree._root]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children.values()
    return found


def check(tree):
    """What must always hold."""
    every = nodes(tree)
    assert set(every) == {tree._root, *tree._order}
    assert tree.size == sum(n.cost for n in tree._order)
    rank = {node: i for i, node in enumerate(tree._order)}
    for node in every:
        for first, child in node.children.items():
            assert child.parent is node
            assert child.label[0] == first
            assert node is tree._root or child.workers <= node.workers
            assert node is tree._root or rank[child] < rank[node]
    marked = {w: {n for n in tree._order if w in n.workers} for w in WORKERS}
    assert {w: m for w, m in tree._marked.items() if m} == {w: m for w, m in marked.items() if m}


keys = st.text(alphabet="ab", max_size=12).map(str.encode)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), keys, st.sampled_from(WORKERS)),
        st.tuples(st.just("remove"), st.just(b""), st.sampled_from(WORKERS)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps, keys)
def test_a_worker_matches_as_far_as_any_prompt_it_saw(steps, probe):
    tree = PrefixTree(1 << 20)
    seen = {w: [] for w in WORKERS}
    for what, key, worker in steps:
        if what == "insert":
            tree.insert(key, worker)
            seen[worker].append(key)
        else:
            tree.remove(worker)
            seen[worker] = []
        check(tree)
    expected = {w: max((common(probe, k) for k in ks), default=0) for w, ks in seen.items()}
    assert tree.match(probe) == {w: n for w, n in expected.items() if n}


@settings(max_examples=100, deadline=None)
@given(steps)
def test_it_stays_within_its_bound_and_whole(steps):
    tree = PrefixTree(4 * (NODE_BYTES + 4))
    for what, key, worker in steps:
        if what == "insert":
            tree.insert(key, worker)
        else:
            tree.remove(worker)
        check(tree)
        assert tree.size <= 4 * (NODE_BYTES + 4)


def test_what_was_used_least_recently_goes_first():
    tree = PrefixTree(3 * (NODE_BYTES + 20))
    tree.insert(b"a" * 10, A)
    tree.insert(b"b" * 10, B)
    tree.insert(b"c" * 10, C)
    tree.insert(b"a" * 10, B)
    tree.insert(b"d" * 10, A)
    assert tree.match(b"a" * 10) == {A: 10, B: 10}
    assert tree.match(b"b" * 10) == {}
    assert tree.match(b"d" * 10) == {A: 10}


def test_removing_the_last_worker_leaves_nothing():
    tree = PrefixTree(1 << 20)
    source = random.Random(1)
    for _ in range(200):
        tree.insert(bytes(source.choices(b"ab", k=30)), source.choice(WORKERS))
    for worker in WORKERS:
        tree.remove(worker)
    assert (len(tree), tree.size) == (0, 0)
    assert tree._root.children == {}
