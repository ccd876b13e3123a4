"""The `openai` package: which exception each refusal becomes, models, and a stream that is left.

Arguments: the address of a server; standard input: `{"keyed": address of one that wants the key "right"}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import openai
from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

url = sys.argv[1] + "/v1"
keyed = json.load(sys.stdin)["keyed"] + "/v1"
client = OpenAI(base_url=url, max_retries=0)
model = client.models.list().data[0]
hello: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "Hello"}]


def refused(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        call()
    except openai.APIStatusError as error:
        return {
            "class": type(error).__name__,
            "status": error.status_code,
            "param": error.param,
            "message": error.message,
            "request_id": error.request_id,
        }
    raise AssertionError("it was answered")


def chat(client: OpenAI = client, model: str = model.id, **body: Any) -> Any:
    return client.chat.completions.create(model=model, messages=hello, **body)


left = chat(stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
first = next(iter(left)).model_dump(mode="json")
left.close()

print(
    json.dumps(
        {
            "models": [found.id for found in client.models.list()],
            "model": client.models.retrieve(model.id).model_dump(mode="json", exclude_unset=True),
            "left stream": first,
            "request id": chat(max_tokens=1)._request_id,
            "refused": {
                "unknown model": refused(lambda: chat(model="nobody")),
                "unknown model looked up": refused(lambda: client.models.retrieve("nobody")),
                "negative max_tokens": refused(lambda: chat(max_tokens=-1)),
                "a streamed one": refused(lambda: chat(temperature=9, stream=True)),
                "audio": refused(lambda: chat(modalities=["audio"])),
                "no such route": refused(lambda: client.embeddings.create(model=model.id, input="Hello")),
                "too long": refused(lambda: client.completions.create(model=model.id, prompt="a b " * 5000)),
                "wrong key": refused(lambda: OpenAI(base_url=keyed, api_key="wrong").models.list()),
                "right key, no workers": refused(
                    lambda: chat(OpenAI(base_url=keyed, api_key="right", max_retries=0))
                ),
            },
        }
    )
)
