from __future__ import annotations

from diptych.engine.wire import Finish, SamplingParams, TokenLogprob, TokenOutput
from diptych.server.sample import Sample, SampleSpec, usage
from diptych.server.sampling_options import TextOptions
from diptych.server.tokenizer import Tokenizer

EOS = 2


def sample(tokenizer: Tokenizer, index: int = 0, prompt_index: int = 0, match: bool = True, **text) -> Sample:
    spec = SampleSpec(
        index=index,
        prompt_index=prompt_index,
        prompt_ids=[1, 2, 3],
        sampling=SamplingParams(max_new_tokens=100, seed=0),
        text=TextOptions(**text),
        rid="r",
    )
    return Sample(spec, f"wire-{index}", tokenizer, match_stops=match)


def output(tokenizer: Tokenizer, text: str, finish: Finish | None = None, extra: list[int] | None = None):
    ids = [*tokenizer.encode(text, add_special_tokens=False), *(extra or [])]
    logprobs = [TokenLogprob(token_id, -1.0) for token_id in ids]
    return TokenOutput(rid="wire-0", token_ids=ids, logprobs=logprobs, finish=finish)


def test_tokens_after_a_stop_string_do_not_count(tokenizer: Tokenizer):
    running = sample(tokenizer, stops=(" three",))
    counted = running.absorb(output(tokenizer, " one two three four five"))
    delta = running.take()
    assert delta.text == " one two"
    assert delta.matched == " three"
    assert delta.finish is not None
    assert delta.finish.kind == "stop"
    assert counted == len(running.token_ids) == len(running.logprobs) == 3


def test_a_stop_string_over_several_outputs_is_found_and_never_shown(tokenizer: Tokenizer):
    running = sample(tokenizer, stops=("two three",))
    shown = []
    for word in (" one", " two", " three"):
        running.absorb(output(tokenizer, word))
        shown.append(running.take().text)
    assert "".join(shown) == " one "
    assert running.matched == "two three"


def test_the_stop_string_can_be_kept(tokenizer: Tokenizer):
    running = sample(tokenizer, stops=(" two",), keep_stop=True)
    running.absorb(output(tokenizer, " one two three"))
    assert running.take().text == " one two"


def test_a_stop_string_in_the_last_token_beats_length(tokenizer: Tokenizer):
    running = sample(tokenizer, stops=(" two",))
    running.absorb(output(tokenizer, " one two", Finish(kind="length")))
    assert running.take().matched == " two"


def test_text_held_for_a_stop_string_comes_at_the_end(tokenizer: Tokenizer):
    running = sample(tokenizer, stops=(" two three",))
    running.absorb(output(tokenizer, " one two"))
    assert running.take().text == " one"
    running.absorb(TokenOutput(rid="wire-0", finish=Finish(kind="length")))
    delta = running.take()
    assert delta.text == " two"
    assert delta.finish is not None
    assert delta.finish.kind == "length"


def test_a_stop_tokens_text_is_left_out_but_counts(tokenizer: Tokenizer):
    ordinary = tokenizer.encode(" five", add_special_tokens=False)[0]
    for keep, text in ((False, " one"), (True, " one five")):
        running = sample(tokenizer, keep_stop=keep)
        running.absorb(output(tokenizer, " one", Finish(kind="stop", matched=ordinary), [ordinary]))
        delta = running.take()
        assert (delta.text, delta.matched, len(delta.token_ids)) == (text, ordinary, 2)


def test_without_matching_a_stop_string_is_ordinary_text(tokenizer: Tokenizer):
    running = sample(tokenizer, match=False, stops=(" one",))
    running.absorb(output(tokenizer, " one"))
    assert running.finish is None


def test_usage_counts_each_prompt_once(tokenizer: Tokenizer):
    samples = [sample(tokenizer, index=i, prompt_index=i // 2) for i in range(4)]
    for running in samples:
        running.absorb(TokenOutput(rid="x", token_ids=[5, 6], cached_tokens=2))
    assert usage(samples) == {
        "prompt_tokens": 6,
        "completion_tokens": 8,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
