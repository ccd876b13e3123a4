"""A transfer backend whose writes fail, land although they failed, stall, come late, or carry wrong bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diptych.engine.faults import FaultRule
from diptych.kvtransfer.backends.interface import (
    Endpoint,
    PageWrite,
    TransferBackend,
    WriteState,
    new_write,
)
from diptych.kvtransfer.errors import TransferError
from diptych.kvtransfer.faults.injector import Held, Injector


@dataclass(slots=True, eq=False)
class _Kept:
    """A write that the real backend gets later or never; the `handle` of its `PageWrite`."""

    write: PageWrite
    src_pages: list[int]
    dst_pages: list[int]
    held: Held | None = None
    inner: PageWrite | None = None


class FaultyBackend(TransferBackend):
    """Around the real one, and named like it: peers compare names."""

    def __init__(self, inner: TransferBackend, faults: Injector) -> None:
        """The inner backend is this one's to close."""
        self.name = inner.name  # type: ignore[misc]
        self._inner = inner
        self._faults = faults
        self._own = inner.endpoint()
        self._peers: dict[str, Endpoint] = {}
        self._kept: list[_Kept] = []
        """Not yet with the real backend, or not yet final there."""
        self._late: list[_Kept] = []
        """Reported as failed; their bytes are still to land."""
        self._leaving: dict[str, Endpoint] = {}
        """Peers to disconnect once nothing is to land there any more."""

    def endpoint(self) -> Endpoint:
        return self._inner.endpoint()

    def connect(self, peer: str, endpoint: Endpoint) -> None:
        leaving = self._leaving.pop(peer, None)
        if leaving != endpoint:
            # Else the connection was kept for bytes that are still to land.
            self._inner.connect(peer, endpoint)
        self._peers[peer] = endpoint

    def post_write(self, peer: str, src_pages: Sequence[int], dst_pages: Sequence[int]) -> PageWrite:
        endpoint = self._peers.get(peer)
        # Checked here too: what is kept back must be refused now or not at all.
        write = new_write(
            peer,
            src_pages,
            dst_pages,
            page_bytes=self._own.page_bytes,
            num_pages=self._own.num_pages,
            peer_pages=None if endpoint is None else endpoint.num_pages,
        )
        room = self._faults.destinations.get((peer, dst_pages[0])) if dst_pages else None
        rule = self._faults.decide("write", room=room)
        if rule is None:
            return self._inner.post_write(peer, src_pages, dst_pages)
        if rule.action == "corrupt":
            return self._inner.post_write(peer, self._with_a_wrong_page(src_pages), dst_pages)
        write.handle = kept = _Kept(write, list(src_pages), list(dst_pages))
        self._keep(kept, rule, room)
        return write

    def _with_a_wrong_page(self, src_pages: Sequence[int]) -> list[int]:
        wrong = list(src_pages)
        random = self._faults.random
        i = random.randrange(len(wrong))
        wrong[i] = (wrong[i] + random.randrange(1, self._own.num_pages)) % self._own.num_pages
        return wrong

    def _keep(self, kept: _Kept, rule: FaultRule, room: int | None) -> None:
        match rule.action:
            case "fail":
                self._fail(kept, "injected fault: the write failed before a byte was written")
                return
            case "fail_late":
                self._fail(kept, "injected fault: the write failed, and its bytes may still land")
                self._late.append(kept)
            case _:
                self._kept.append(kept)
        kept.held = self._faults.hold(rule, lambda: self._post(kept), room=room, peer=kept.write.peer)

    def _post(self, kept: _Kept) -> None:
        """Now for real."""
        kept.held = None
        try:
            kept.inner = self._inner.post_write(kept.write.peer, kept.src_pages, kept.dst_pages)
        except TransferError as error:
            self._fail(kept, str(error))

    def _fail(self, kept: _Kept, error: str) -> None:
        if kept in self._kept:
            self._kept.remove(kept)
        kept.write.error = error
        kept.write.finished_at = self._faults.clock()
        kept.write.state = WriteState.FAILED

    def poll(self, write: PageWrite) -> WriteState:
        kept = write.handle
        if not isinstance(kept, _Kept):
            return self._inner.poll(write)
        if kept in self._kept and kept.inner is not None:
            state = self._inner.poll(kept.inner)
            if state is not WriteState.IN_FLIGHT:
                self._kept.remove(kept)
                write.error = kept.inner.error
                write.finished_at = kept.inner.finished_at
                write.state = state
        return write.state

    def expect_writes(self, expected: bool) -> None:
        self._inner.expect_writes(expected)

    def fileno(self) -> int | None:
        return self._inner.fileno()

    def clear_wakeup(self) -> None:
        self._inner.clear_wakeup()
        self._follow_late()

    def _follow_late(self) -> None:
        """Nobody else asks after writes that were reported as failed."""
        self._late = [kept for kept in self._late if self._is_late(kept)]
        busy = {kept.write.peer for kept in self._late}
        for peer in [peer for peer in self._leaving if peer not in busy]:
            del self._leaving[peer]
            self._inner.disconnect(peer)

    def _is_late(self, kept: _Kept) -> bool:
        if kept.held is not None:
            return True
        return kept.inner is not None and self._inner.poll(kept.inner) is WriteState.IN_FLIGHT

    def disconnect(self, peer: str) -> None:
        endpoint = self._peers.pop(peer, None)
        for key in [key for key in self._faults.destinations if key[0] == peer]:
            del self._faults.destinations[key]
        for kept in [kept for kept in self._kept if kept.write.peer == peer and kept.inner is None]:
            self._drop(kept, "the peer was disconnected")
        if endpoint is not None and any(kept.write.peer == peer for kept in self._late):
            self._leaving[peer] = endpoint
        else:
            self._inner.disconnect(peer)

    def _drop(self, kept: _Kept, error: str) -> None:
        if kept.held is not None:
            self._faults.forget(kept.held)
            kept.held = None
        self._fail(kept, error)

    def close(self) -> None:
        for kept in [*self._kept, *self._late]:
            if kept.inner is None:
                self._drop(kept, "the backend was closed")
        self._inner.close()
