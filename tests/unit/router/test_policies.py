"""Each policy on its own."""

from __future__ import annotations

import json
import random
import time
from collections import Counter

import pytest

from diptych.common_config import Program, Role, parse_command_line, publish
from diptych.router.call import Call, parse_fields
from diptych.router.policies import configured_policy
from diptych.router.policies.cache_aware import CacheAware, CacheAwareSettings
from diptych.router.policies.prompt_key import MAX_KEY_BYTES, prompt_key
from diptych.router.policies.simple import LeastLoaded, PowerOfTwo, Random, RoundRobin
from diptych.router.workers import Worker, WorkerRole

CALL = Call(path="/generate", fields={}, headers={}, request_id="r")


def call(raw, path="/v1/chat/completions"):
    data = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    return Call(path=path, fields=parse_fields(data), headers={}, request_id="r")


def completion(prompt):
    return call({"prompt": prompt}, "/v1/completions")


def chat(*contents, **fields):
    roles = ["system", *["user", "assistant"] * len(contents)]
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return call({"messages": messages, **fields})


def workers(count, policy=None):
    made = [Worker(WorkerRole.PREFILL, f"http://host-{i}:80", 8998) for i in range(count)]
    for worker in made:
        worker.mark_up()
        if policy is not None:
            policy.added(worker)
    return made


def cache_aware(**changes):
    defaults = {
        "cache_threshold": 0.3,
        "balance_abs_threshold": 8,
        "balance_rel_threshold": 1.2,
        "max_tree_size": 1 << 26,
    }
    return CacheAware(CacheAwareSettings(**{**defaults, **changes}))


def test_round_robin_visits_each_in_order():
    candidates = workers(3)
    policy = RoundRobin()
    assert [policy.pick(candidates, CALL) for _ in range(6)] == candidates * 2


def test_random_is_even():
    candidates = workers(4)
    policy = Random(random.Random(1))
    counts = Counter(policy.pick(candidates, CALL).url for _ in range(4000))
    assert len(counts) == 4
    assert all(900 < count < 1100 for count in counts.values())


def test_power_of_two_takes_the_less_loaded_of_two_and_so_never_the_most_loaded():
    candidates = workers(4)
    for number, worker in enumerate(candidates):
        for _ in range(number):
            worker.begin(10)
    policy = PowerOfTwo(random.Random(1))
    counts = Counter(policy.pick(candidates, CALL) for _ in range(600))
    assert candidates[3] not in counts
    # Of the six pairs the idlest is in three, the next is the better one of two, the third of one.
    assert [round(counts[w] / 100) for w in candidates[:3]] == [3, 2, 1]
    assert policy.pick(candidates[3:], CALL) is candidates[3]


def test_least_loaded_counts_requests_then_bytes_then_turns():
    policy = LeastLoaded()
    candidates = workers(3, policy)
    assert [policy.pick(candidates, CALL) for _ in range(6)] == candidates * 2
    candidates[0].begin(1)
    candidates[1].begin(5)
    candidates[2].begin(1)
    candidates[2].begin(1)
    assert policy.pick(candidates, CALL) is candidates[0]
    candidates[0].end(1)
    candidates[0].begin(9)
    assert policy.pick(candidates, CALL) is candidates[1]


@pytest.mark.parametrize(
    ("flags", "prefill", "decode"),
    [
        ([], CacheAware, LeastLoaded),
        (["--policy", "random"], Random, Random),
        (["--prefill-policy", "round_robin"], RoundRobin, LeastLoaded),
        (["--policy", "round_robin", "--decode-policy", "power_of_two"], RoundRobin, PowerOfTwo),
    ],
)
def test_a_side_without_a_policy_of_its_own_has_the_common_one(flags, prefill, decode):
    publish(parse_command_line(Program.ROUTER, flags), role=Role.ROUTER)
    assert isinstance(configured_policy(WorkerRole.PREFILL), prefill)
    assert isinstance(configured_policy(WorkerRole.DECODE), decode)


# ---- what stands for a prompt -------------------------------------------------------------------------


def shared(one, two):
    a, b = prompt_key(one), prompt_key(two)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_next_turn_begins_with_the_whole_turn_before():
    before, after = chat("sys", "one"), chat("sys", "one", "two", "three")
    assert shared(before, after) == len(prompt_key(before))


def test_the_json_writer_makes_no_difference():
    compact = b'{"messages":[{"role":"user","content":"h\xc3\xa9"}],"model":"m"}'
    spaced = b'{"model": "m", "messages": [ {"content": "h\\u00e9", "role": "user"} ]}'
    assert prompt_key(call(compact)) == prompt_key(call(spaced))
    assert prompt_key(completion([1, 22, 3])) == prompt_key(call(b'{"prompt":[1,22,3]}'))
    assert prompt_key(call(b'{"prompt":"a/b"}')) == prompt_key(call(b'{"prompt":"a\\/b"}'))


def test_tools_are_part_of_the_beginning():
    with_a, with_b = chat("sys", "hi", tools=[{"a": 1}]), chat("sys", "hi", tools=[{"b": 1}])
    assert prompt_key(with_a) != prompt_key(with_b)
    assert shared(with_a, chat("sys", "other", tools=[{"a": 1}])) > len('[{"a": 1}]')


def test_of_several_prompts_the_first_counts():
    assert prompt_key(completion(["abc", "x"])) == prompt_key(completion("abc"))
    assert prompt_key(completion([[1, 2], [3]])) == prompt_key(completion([1, 2]))


def test_the_same_bytes_as_text_and_as_chat_are_not_the_same_prompt():
    assert shared(call({"text": "user"}, "/generate"), chat("user")) < 4


@pytest.mark.parametrize(
    "raw",
    [
        b"{}",
        b'{"prompt":null}',
        b'{"prompt":[]}',
        b'{"prompt":[[]]}',
        b'{"prompt":7}',
        b'{"prompt":{"a":1}}',
        b'{"messages":"x"}',
        b'{"messages":[1]}',
        b'{"messages":[{"role":1,"content":[{"type":"text","text":"x"}]}]}',
        b'{"messages":[{"content":' + b"[" * 900 + b"]" * 900 + b"}]}",
        b'{"input":[{"type":"message","content":"x"}]}',
    ],
)
def test_no_body_is_too_strange_for_a_key(raw):
    assert isinstance(prompt_key(call(raw)), bytes)


def test_a_key_is_never_longer_than_the_bound():
    assert len(prompt_key(completion("x" * (MAX_KEY_BYTES + 5)))) == MAX_KEY_BYTES


# ---- cache_aware --------------------------------------------------------------------------------------

LONG = "the quick brown fox jumps over the lazy dog " * 20


def test_a_known_beginning_goes_where_it_was_seen():
    policy = cache_aware()
    candidates = workers(3, policy)
    homes = {name: policy.pick(candidates, completion(name + LONG)) for name in "abc"}
    assert set(homes.values()) == set(candidates)
    for turn in range(4):
        for name in "cab":
            assert policy.pick(candidates, completion(name + LONG + f"question {turn}")) is homes[name]


def test_a_match_below_the_threshold_goes_by_load():
    policy = cache_aware(cache_threshold=0.5)
    candidates = workers(2, policy)
    first = policy.pick(candidates, completion("a" * 400))
    other = candidates[1 - candidates.index(first)]
    assert policy.pick(candidates, completion("a" * 390 + "b" * 400)) is other  # 49 %
    assert policy.pick(candidates, completion("a" * 390 + "c" * 300)) is not None
    policy = cache_aware(cache_threshold=0.5)
    candidates = workers(2, policy)
    first = policy.pick(candidates, completion("a" * 400))
    assert policy.pick(candidates, completion("a" * 390 + "b" * 300)) is first  # 56 %


def test_short_prompts_that_look_alike_are_spread():
    policy = cache_aware()
    candidates = workers(3, policy)
    assert {policy.pick(candidates, completion("hi")) for _ in range(3)} == set(candidates)


def test_a_queue_longer_by_both_thresholds_is_passed_over_and_the_other_worker_learns():
    policy = cache_aware(balance_abs_threshold=4, balance_rel_threshold=1.5)
    candidates = workers(2, policy)
    home = policy.pick(candidates, completion(LONG))
    other = candidates[1 - candidates.index(home)]
    for _ in range(10):
        other.begin(1)
    for _ in range(14):
        home.begin(1)
    assert policy.pick(candidates, completion(LONG)) is home  # 14 is 4 more than 10, not 1.5 times as many
    home.begin(1)
    home.begin(1)
    assert policy.pick(candidates, completion(LONG)) is other
    for _ in range(16):
        home.end(1)
    for _ in range(10):
        other.end(1)
    assert {policy.pick(candidates, completion(LONG)) for _ in range(4)} == {home, other}


def test_one_hot_beginning_is_spread_even_when_nobody_queues():
    policy = cache_aware()
    candidates = workers(3, policy)
    counts = Counter(policy.pick(candidates, completion(f"{LONG}{i:05}")) for i in range(300))
    assert max(counts.values()) / 100 <= 1.3


def test_a_new_worker_is_not_flooded():
    policy = cache_aware()
    candidates = workers(2, policy)
    for number in range(100):
        policy.pick(candidates, completion(f"{number:04}" * 50))
    new = Worker(WorkerRole.PREFILL, "http://new:80", 1)
    policy.added(new)
    counts = Counter(policy.pick([*candidates, new], completion(f"{n:04}" * 50)) for n in range(500, 560))
    assert 15 <= counts[new] <= 25


def test_a_removed_worker_is_forgotten():
    policy = cache_aware()
    candidates = workers(2, policy)
    home = policy.pick(candidates, completion(LONG))
    policy.removed(home)
    rest = [w for w in candidates if w is not home]
    assert policy.pick(rest, completion(LONG)) is rest[0]
    assert policy._tree.match(prompt_key(completion(LONG))) == {rest[0]: len(prompt_key(completion(LONG)))}


@pytest.mark.parametrize(
    "prompt", [[i * 37 % 49152 for i in range(32768)], "hello world " * 11_000], ids=["ids", "text"]
)
def test_a_pick_for_32k_tokens_takes_about_a_millisecond_at_most(prompt):
    policy = cache_aware()
    candidates = workers(4, policy)
    raw = json.dumps({"prompt": prompt}).encode()
    times = []
    for number in range(30):
        request = call(raw[:-2] + (b", %d]}" % number if isinstance(prompt, list) else b'%d"}' % number))
        started = time.perf_counter()
        policy.pick(candidates, request)
        times.append(time.perf_counter() - started)
    assert sorted(times)[len(times) // 4] < 0.002  # an unlucky machine; 0.5 ms on a quiet one
