"""The frontend's end of the socket to its scheduler."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from typing import cast

import msgspec
import zmq
import zmq.asyncio

from diptych.engine.wire import (
    MAX_MESSAGE_BYTES,
    FrontendMessage,
    SchedulerMessage,
    decode_from_scheduler,
    encode,
)

logger = logging.getLogger(__name__)


class SchedulerLink:
    """A PAIR socket on a fresh abstract-namespace address, which leaves no file behind."""

    def __init__(self) -> None:
        self.address = f"ipc://@diptych-{secrets.token_hex(16)}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.bind(self.address)

    def send(self, message: FrontendMessage) -> bool:
        """Queue a message; never blocks. False when no scheduler is connected to take it."""
        sent = cast("asyncio.Future[None]", self._socket.send(encode(message), flags=zmq.NOBLOCK))
        return not (sent.done() and sent.exception() is not None)

    async def messages(self) -> AsyncIterator[SchedulerMessage]:
        """What the scheduler says, for as long as the caller listens. A message that can't be decoded is
        logged and dropped: the other end is ours, so it means a bug, not an attack."""
        while True:
            data = await self._socket.recv()
            try:
                yield decode_from_scheduler(data)
            except msgspec.DecodeError as error:
                logger.error("unreadable message from the scheduler: %s", error)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
