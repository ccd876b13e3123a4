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
from diptych.server.errors import Unavailable

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

    def send(self, message: FrontendMessage) -> None:
        """Queue a message; never blocks. Raises `Unavailable` when no scheduler is connected."""
        sent = cast("asyncio.Future[None]", self._socket.send(encode(message), flags=zmq.NOBLOCK))
        if sent.done() and sent.exception() is not None:
            raise Unavailable("the worker's scheduler is gone")

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
