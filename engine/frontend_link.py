"""The scheduler's end of the socket to its frontend process."""

from __future__ import annotations

import zmq

from diptych.engine.wire import (
    MAX_MESSAGE_BYTES,
    FrontendMessage,
    SchedulerMessage,
    decode_from_frontend,
    encode,
)


class FrontendLink:
    """A ZMQ PAIR socket. Sending never blocks the loop: messages queue until the frontend reads them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.connect(address)

    def receive(self) -> list[FrontendMessage]:
        """Everything that has arrived. Raises `msgspec.ValidationError`: our own frontend never errs."""
        messages: list[FrontendMessage] = []
        while self.socket.poll(0):
            messages.append(decode_from_frontend(self.socket.recv()))
        return messages

    def send(self, message: SchedulerMessage) -> None:
        self.socket.send(encode(message))

    def close(self) -> None:
        self.socket.close()
