"""What prefill alone knows of a prompt, merged into decode's answer: each route and shape."""

from __future__ import annotations

import copy

import msgspec
import pytest

from diptych.router.call import Call, parse_fields
from diptych.router.prompt_logprobs import EchoedLogprobs, NativeLogprobs, prompt_logprobs


def call(path, **fields):
    return Call(path=path, fields=parse_fields(msgspec.json.encode(fields)), headers={}, request_id="r")


@pytest.mark.parametrize(
    ("path", "fields", "kind"),
    [
        ("/generate", {"return_logprob": True, "logprob_start_len": 0}, NativeLogprobs),
        ("/generate", {"return_logprob": [False, True], "logprob_start_len": [-1, 2]}, NativeLogprobs),
        ("/generate", {"return_logprob": True}, None),
        ("/generate", {"return_logprob": True, "logprob_start_len": -1}, None),
        ("/generate", {"return_logprob": False, "logprob_start_len": 0}, None),
        ("/generate", {"return_logprob": 1, "logprob_start_len": "x"}, None),
        ("/v1/completions", {"echo": True, "logprobs": 0}, EchoedLogprobs),
        ("/v1/completions", {"echo": True}, None),
        ("/v1/completions", {"logprobs": 1}, None),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "echo": True}, None),
    ],
)
def test_only_who_asks_for_prompt_logprobs_may_lack_them(path, fields, kind):
    assert type(prompt_logprobs(call(path, **fields))) is (kind or type(None))


def native(**meta):
    return {"text": "x", "meta_info": {"id": "1", "output_token_logprobs": [[-1.0, 5, None]]} | meta}


INPUT = {
    "input_token_logprobs": [[None, 1, None], [-0.5, 2, None]],
    "input_top_logprobs": [None, [[-0.1, 9, None]]],
    "input_token_ids_logprobs": [None, [[-0.2, 8, None]]],
}


@pytest.mark.parametrize("empty", [{}, {"input_token_logprobs": []}, {"input_token_logprobs": None}])
def test_native_a_lone_answer_gets_all_lists_of_the_prompt(empty):
    shape = NativeLogprobs()
    decode = native(**empty)
    assert shape.lacking(decode)
    assert shape.learn([native(**INPUT)])
    assert shape.complete(decode) == native(**INPUT)


def test_native_a_batch_is_completed_sample_by_sample():
    shape = NativeLogprobs()
    other = {"input_token_logprobs": [[None, 7, None]]}
    decode = [native(), native(input_token_logprobs=[[-9.0, 3, None]]), native()]
    assert shape.lacking(decode)
    assert shape.learn([[native(**INPUT), native(**other), native(**other)]])
    whole = shape.complete(decode)
    assert whole[0] == native(**INPUT)
    assert whole[1]["meta_info"]["input_token_logprobs"] == [[-9.0, 3, None]]  # decode's own word counts
    assert whole[2] == native(**other)


def test_native_every_event_of_a_stream_is_completed_by_its_index():
    shape = NativeLogprobs()
    other = {"input_token_logprobs": [[None, 7, None]]}
    events = [native(**INPUT) | {"index": 0}, native() | {"index": 1}, native(**other) | {"index": 1}]
    assert shape.learn(events)
    for index, expected in ((1, other), (0, INPUT), (1, other)):
        event = shape.complete(native() | {"index": index})
        assert event == native(**expected) | {"index": index}


def test_native_ours_are_left_alone():
    shape = NativeLogprobs()
    assert not shape.lacking(native(**INPUT))
    assert not shape.learn([native(), {"text": ""}, "nonsense", None, {"meta_info": 3}])


def lists(tokens, values, offset=0):
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": [None if v is None else {t: v} for t, v in zip(tokens, values, strict=True)],
        "text_offset": list(range(offset, offset + len(tokens))),
    }


def completion(*logprobs, usage=None, first=0):
    choices = [{"index": first + i, "text": "t", "logprobs": entry} for i, entry in enumerate(logprobs)]
    return {"choices": choices} | ({} if usage is None else {"usage": {"completion_tokens": usage}})


PROMPT = lists(["a", "b"], [None, -0.5])
RUN = lists(["a", "b", "c"], [None, -0.5, -0.7])
OUTPUT = lists(["c", "d"], [-0.7, -0.8], offset=2)
WHOLE = lists(["a", "b", "c", "d"], [None, -0.5, -0.7, -0.8])


def test_echo_the_prompt_comes_before_the_output_once():
    shape = EchoedLogprobs(outputs=1)
    decode = completion(OUTPUT, usage=2)
    assert shape.lacking(decode)
    assert shape.learn([completion(RUN, usage=1)])
    assert shape.complete(decode) == completion(WHOLE, usage=2)


def test_echo_of_a_batch_and_several_samples():
    shape = EchoedLogprobs(outputs=1)
    other = lists(["z", "y"], [None, -3.0])
    assert shape.learn([completion(RUN, other, usage=2)])
    merged = shape.complete(completion(OUTPUT, lists(["q"], [-0.1], offset=1)))
    assert merged["choices"][0]["logprobs"] == WHOLE
    assert merged["choices"][1]["logprobs"] == lists(["z", "q"], [None, -0.1])


@pytest.mark.parametrize("nothing", [None, lists([], [])])
def test_echo_without_output_is_the_prompt_alone(nothing):
    shape = EchoedLogprobs(outputs=0)
    decode = completion(nothing)
    assert shape.lacking(decode)
    assert shape.learn([completion(PROMPT)])
    assert shape.complete(decode) == completion(PROMPT)


def test_echo_in_a_stream_only_the_first_piece_of_each_choice_gets_it():
    shape = EchoedLogprobs(outputs=1)
    # Prefill's own stream may come in pieces, and without usage.
    pieces = [completion(PROMPT), completion(lists(["c"], [-0.7], offset=2))]
    assert shape.learn([*pieces, completion(RUN, first=1), {"choices": []}])
    first = [shape.complete(completion(lists(["c"], [-0.7], offset=2), first=i)) for i in (1, 0)]
    assert first == [completion(RUN, first=i) for i in (1, 0)]
    later = completion(lists(["d"], [-0.8], offset=3))
    assert shape.complete(copy.deepcopy(later)) == later


def test_echo_ours_are_left_alone():
    shape = EchoedLogprobs(outputs=1)
    assert not shape.lacking(completion(WHOLE))
    assert not shape.learn([completion(lists(["c"], [-0.7])), completion(None), [], {"choices": [3]}])
    # Even if somebody asks.
    assert shape.learn([completion(RUN, usage=1)])
    assert shape.complete(completion(WHOLE)) == completion(WHOLE)
