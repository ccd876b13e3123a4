"""What of a request stands for the beginning of its prompt."""

from __future__ import annotations

import msgspec

from diptych.router.call import Call

MAX_KEY_BYTES = 1 << 20
"""Of a longer prompt only so much is compared: some 250,000 tokens of text."""

_PROMPT_FIELDS = ("prompt", "input_ids", "text", "input")
_prompts = msgspec.json.Decoder(list[msgspec.Raw])
_messages = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_text = msgspec.json.Decoder(str)


def prompt_key(call: Call) -> bytes:
    """Bytes such that two requests with a common beginning of their prompts have a common beginning of their
    keys, as far as can be told without a tokenizer and a chat template. Empty when there is no prompt.

    What is up to a client's JSON writer makes no difference: spaces between token ids, escapes, the order of
    a message's keys. A request of several prompts goes by its first. Nothing is refused here: a prompt of a
    wrong type just has a key of little use.
    """
    fields = call.fields
    # A template puts tools before the first message, or right behind the system prompt.
    head = b"".join(bytes(fields[name]) for name in ("tools", "instructions") if name in fields)
    for name in ("messages", *_PROMPT_FIELDS):
        if name in fields:
            raw = bytes(fields[name])
            try:
                return (head + _canonical(raw))[:MAX_KEY_BYTES]
            except (msgspec.DecodeError, RecursionError):
                return (head + raw)[:MAX_KEY_BYTES]
    return b""


def _canonical(raw: bytes) -> bytes:
    if raw[:1] == b'"':
        return b"text" + _string(raw)
    first = raw[1:64].lstrip()[:1]
    if first == b"{":
        return b"chat" + b"\x00".join(part for message in _messages.decode(raw) for part in _parts(message))
    if first in (b'"', b"["):
        return _canonical(bytes(_prompts.decode(raw)[0]))
    # Token ids. Removing spaces costs more than all else, and most writers that put any put them everywhere.
    return b"ids" + (raw.translate(None, b" \t\r\n") if b" " in raw[:64] else raw)


def _parts(message: dict[str, msgspec.Raw]) -> list[bytes]:
    """Role and content first, whatever comes first in the request."""
    parts = [_string(bytes(message[name])) for name in ("role", "content") if name in message]
    for name in sorted(message.keys() - {"role", "content"}):
        parts += (name.encode("utf-8", "surrogatepass"), bytes(message[name]))
    return parts


def _string(raw: bytes) -> bytes:
    return _text.decode(raw).encode() if raw[:1] == b'"' else raw
