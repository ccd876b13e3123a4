"""How fast pages get from a prefill process to a decode process, beside what the library does alone and
beside memcpy of the same bytes."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from diptych.bench.processes import JsonProcess, json_process
from diptych.bench.table import ratio, table

PAGE_BYTES = 368_640
"""16 tokens of the default model in bfloat16."""
SIZES = (1, 8, 64, 512)
BYTES_A_CALL = 64 << 20
"""How many transfers one call makes: enough that the figure is a median of many, not so many that it takes
long."""
MOST_A_CALL = 20
IN_FLOW = 8
WARM_UP = 50
FLOW = 5
"""Times as many rooms as one at a time: what a flow's start and end take should not count for much."""


class BadTransfer(Exception):
    """Pages that arrived wrong, or in more descriptors than there are runs."""


class Figures(msgspec.Struct, kw_only=True):
    """One backend, one size, one way of lying in the pools. Seconds are medians."""

    backend: str
    pages: int
    layout: str
    """`contiguous`: one run on both sides; `scattered`: drawn at random on both sides."""
    runs: int
    """Contiguous on both sides."""
    descriptors: int
    """The most that one transfer took."""
    transfers: int
    """Of which the medians are."""
    reserve_to_received: float
    """Decode: from calling `reserve` until `Received`, the control round trip included."""
    send_to_received: float
    """From calling `send` at prefill until `Received` at decode: pages to pages, and the news of it."""
    in_flow: float
    """The same, of one room among IN_FLOW at a time: the time of many rooms by their number."""
    write: float
    """From posting until prefill's backend knows that the bytes are there: pages to pages."""
    raw: float
    """The library alone, one descriptor, its target driving or at rest, whichever is faster."""
    memcpy: float

    def rate(self, seconds: float) -> float:
        """GB/s."""
        return self.pages * PAGE_BYTES / seconds / 1e9


def pages_of(layout: str, count: int, pool: int, seed: int) -> tuple[list[int], list[int]]:
    """Source and destination pages of one transfer."""
    if layout == "contiguous":
        return list(range(count)), list(range(pool - count, pool))
    source = random.Random(f"pages {count} {seed}")
    return source.sample(range(pool), count), source.sample(range(pool), count)


def count_runs(src: Sequence[int], dst: Sequence[int]) -> int:
    """Runs of pages that are adjacent on both sides."""
    pairs = list(zip(src, dst, strict=True))
    return 1 + sum((a + 1, b + 1) != following for (a, b), following in itertools.pairwise(pairs))


class _Pair:
    """Two processes with our code, and two with the library alone."""

    def __init__(self, backend: str, prefill: JsonProcess, decode: JsonProcess, raw: JsonProcess) -> None:
        self.backend = backend
        self._prefill = prefill
        self._decode = decode
        self._raw = raw
        self._bootstrap: int = prefill.answer()["bootstrap"]
        decode.answer()
        self._rooms = itertools.count(1)
        for salt, side in enumerate((prefill, decode)):
            side.ask("stamp", salt=salt)

    def path(self, src: list[int], dst: list[int], repeats: int, at_once: int = 1) -> dict[str, list[float]]:
        """Move the pages `repeats` times, a room each, so many rooms at once."""
        rooms = list(itertools.islice(self._rooms, repeats))
        self._prefill.ask("send", rooms=rooms, pages=src)
        decode: dict[str, list[float]] = self._decode.ask(
            "receive", rooms=rooms, pages=dst, bootstrap=self._bootstrap, at_once=at_once
        )
        prefill: dict[str, list[float]] = self._prefill.answer()
        return prefill | decode

    def arrived(self, src: list[int], dst: list[int]) -> bool:
        return bool(self._decode.ask("has", src=src, dst=dst, salt=0))

    def forget(self) -> None:
        """Decode's pages become its own again."""
        self._decode.ask("stamp", salt=1)

    def raw(self, target: JsonProcess, drive: bool, num_bytes: int, repeats: int) -> list[float]:
        target.ask("drive", on=drive)
        seconds: list[float] = self._raw.ask("write", num_bytes=num_bytes, repeats=repeats)
        target.ask("drive", on=False)
        return seconds

    def memcpy(self, num_bytes: int, repeats: int) -> list[float]:
        seconds: list[float] = self._raw.ask("copy", num_bytes=num_bytes, repeats=repeats + 1)
        return seconds[1:]


def measure(backend: str, sizes: Sequence[int], rounds: int, seed: int = 0) -> Iterator[Figures]:
    """All four are measured in turn, `rounds` times, so that what else the machine does hits all alike.
    Raises `BadTransfer` and `ProcessFailed`."""
    pool = max(sizes)
    options = msgspec.json.encode({"backend": backend, "num_pages": pool}).decode()
    raw = ("diptych.bench.transfer_raw", ("target", "source"), backend, str(pool * PAGE_BYTES))
    with contextlib.ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(json_process("diptych.bench.transfer_worker", role, options))
            for role in ("prefill", "decode")
        )
        target, source = (stack.enter_context(json_process(raw[0], role, raw[2], raw[3])) for role in raw[1])
        pair = _Pair(backend, prefill, decode, source)
        peer = target.answer()
        source.answer()
        source.ask("connect", peer=peer)
        # Lanes are wired up, code is paged in.
        source.ask("write", num_bytes=PAGE_BYTES, repeats=WARM_UP)
        pair.path([0], [0], WARM_UP, IN_FLOW)
        for pages, layout in itertools.product(sizes, ("contiguous", "scattered")):
            yield _measure_one(pair, target, pages, layout, pool, rounds, seed)


def _measure_one(
    pair: _Pair, target: JsonProcess, pages: int, layout: str, pool: int, rounds: int, seed: int
) -> Figures:
    src, dst = pages_of(layout, pages, pool, seed)
    runs = count_runs(src, dst)
    num_bytes = pages * PAGE_BYTES
    repeats = max(1, min(MOST_A_CALL, BYTES_A_CALL // num_bytes))
    pair.forget()
    descriptors = max(pair.path(src, dst, 2)["descriptors"])
    if not pair.arrived(src, dst):
        raise BadTransfer(f"{pair.backend}: {pages} {layout} pages arrived wrong")
    ours: dict[str, list[float]] = {"reserved": [], "sent": [], "write": [], "flow": []}
    raw: dict[bool, list[float]] = {False: [], True: []}
    memcpy: list[float] = []
    for _ in range(rounds):
        times = pair.path(src, dst, repeats)
        descriptors = max(descriptors, *times["descriptors"])
        ours["reserved"] += _between(times["reserved_at"], times["received_at"])
        ours["sent"] += _between(times["sent_at"], times["received_at"])
        ours["write"] += times["write_seconds"]
        flow = pair.path(src, dst, FLOW * repeats, IN_FLOW)
        ours["flow"].append((max(flow["received_at"]) - min(flow["reserved_at"])) / (FLOW * repeats))
        for drive, seconds in raw.items():
            seconds += pair.raw(target, drive, num_bytes, repeats)
        memcpy += pair.memcpy(num_bytes, repeats)
    if descriptors > runs:
        raise BadTransfer(f"{pair.backend}: {descriptors} descriptors for {runs} contiguous runs")
    return Figures(
        backend=pair.backend,
        pages=pages,
        layout=layout,
        runs=runs,
        descriptors=int(descriptors),
        transfers=len(memcpy),
        reserve_to_received=median(ours["reserved"]),
        send_to_received=median(ours["sent"]),
        in_flow=median(ours["flow"]),
        write=median(ours["write"]),
        raw=min(median(seconds) for seconds in raw.values()),
        memcpy=median(memcpy),
    )


def _between(starts: Sequence[float], ends: Sequence[float]) -> list[float]:
    return [end - start for start, end in zip(starts, ends, strict=True)]


def path_table(figures: Sequence[Figures]) -> str:
    """GB/s, then ratios."""

    def times(f: Figures) -> tuple[float, ...]:
        return f.reserve_to_received, f.send_to_received, f.in_flow, f.write

    ours = ["reserve→received", "send→received", "in flow", "write"]
    rates = [
        [
            f"{f.backend}, {f.pages} {f.layout}",
            f"{f.descriptors} / {f.runs}",
            *(f"{f.rate(seconds):.2f}" for seconds in (*times(f), f.raw, f.memcpy)),
        ]
        for f in figures
    ]
    ratios = [
        [
            f"{f.backend}, {f.pages} {f.layout}",
            *(ratio(f.raw / seconds) for seconds in times(f)),
            ratio(f.memcpy / f.in_flow),
        ]
        for f in figures
    ]
    return "\n\n".join(
        (
            table(["GB/s of pages", "descriptors / runs", *ours, "raw", "memcpy"], rates),
            table(["beside raw", *ours, "in flow / memcpy"], ratios),
        )
    )
