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
WARM_UP = 50


class BadTransfer(Exception):
    """Pages that arrived wrong, or in more descriptors than there are runs."""


class Figures(msgspec.Struct, kw_only=True):
    """One backend, pages in one transfer, and how they lie in the pools. Seconds are medians."""

    backend: str
    pages: int
    run: int
    """Pages in a row on both sides; where in the pools such runs lie is random."""
    runs: int
    """Contiguous on both sides: `pages / run`, or less where two meet by chance."""
    descriptors: int
    """The most that one transfer took."""
    transfers: int
    """Of which the medians are."""
    reserve_to_received: float
    """Decode: from calling `reserve` until `Received`, the control round trip included."""
    send_to_received: float
    """From calling `send` at prefill until `Received` at decode: pages to pages, and the news of it."""
    write: float
    """From posting until prefill's backend knows that the bytes are there: pages to pages."""
    raw: float
    """The library alone, one descriptor, its target driving or at rest, whichever is faster."""
    memcpy: float

    def rate(self, seconds: float) -> float:
        """GB/s."""
        return self.pages * PAGE_BYTES / seconds / 1e9


def pages_of(count: int, run: int, pool: int) -> tuple[list[int], list[int]]:
    """Source and destination pages of one transfer: `count / run` runs, each somewhere in a pool."""
    source = random.Random(f"{count} pages in runs of {run}")

    def scatter() -> list[int]:
        slots = source.sample(range(pool // run), count // run)
        return [slot * run + page for slot in slots for page in range(run)]

    return scatter(), scatter()


def shapes(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(pages, run): each size in one piece, and in runs of the smaller ones."""
    return [(pages, run) for pages in sizes for run in reversed(sizes) if pages % run == 0]


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

    def path(self, src: list[int], dst: list[int], repeats: int) -> dict[str, list[float]]:
        """Move the pages `repeats` times, one room after the other."""
        rooms = list(itertools.islice(self._rooms, repeats))
        self._prefill.ask("send", rooms=rooms, pages=src)
        decode: dict[str, list[float]] = self._decode.ask(
            "receive", rooms=rooms, pages=dst, bootstrap=self._bootstrap
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


def measure(backend: str, sizes: Sequence[int], rounds: int) -> Iterator[Figures]:
    """All four are measured in turn, `rounds` times, so that what else the machine does hits all alike.
    Raises `BadTransfer` and `ProcessFailed`."""
    pool = max(sizes)
    options = msgspec.json.encode({"backend": backend, "num_pages": pool}).decode()
    with contextlib.ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(json_process("diptych.bench.transfer_worker", role, options))
            for role in ("prefill", "decode")
        )
        target, source = (
            stack.enter_context(
                json_process("diptych.bench.transfer_raw", role, backend, str(pool * PAGE_BYTES))
            )
            for role in ("target", "source")
        )
        pair = _Pair(backend, prefill, decode, source)
        peer = target.answer()
        source.answer()
        source.ask("connect", peer=peer)
        # Lanes are wired up, code is paged in.
        source.ask("write", num_bytes=PAGE_BYTES, repeats=WARM_UP)
        pair.path([0], [0], WARM_UP)
        for pages, run in shapes(sizes):
            yield _measure_one(pair, target, pages, run, pool, rounds)


def _measure_one(pair: _Pair, target: JsonProcess, pages: int, run: int, pool: int, rounds: int) -> Figures:
    src, dst = pages_of(pages, run, pool)
    runs = count_runs(src, dst)
    num_bytes = pages * PAGE_BYTES
    repeats = max(2, min(MOST_A_CALL, BYTES_A_CALL // num_bytes))
    pair.forget()
    descriptors = max(pair.path(src, dst, 2)["descriptors"])
    if not pair.arrived(src, dst):
        raise BadTransfer(f"{pair.backend}: {pages} pages in runs of {run} arrived wrong")
    ours: dict[str, list[float]] = {"reserved": [], "sent": [], "write": []}
    raw: dict[bool, list[float]] = {False: [], True: []}
    memcpy: list[float] = []
    for _ in range(rounds):
        times = pair.path(src, dst, repeats)
        descriptors = max(descriptors, *times["descriptors"])
        ours["reserved"] += _between(times["reserved_at"], times["received_at"])
        ours["sent"] += _between(times["sent_at"], times["received_at"])
        ours["write"] += times["write_seconds"]
        for drive, seconds in raw.items():
            seconds += pair.raw(target, drive, num_bytes, repeats)
        memcpy += pair.memcpy(num_bytes, repeats)
    if descriptors > runs:
        raise BadTransfer(f"{pair.backend}: {descriptors} descriptors for {runs} contiguous runs")
    return Figures(
        backend=pair.backend,
        pages=pages,
        run=run,
        runs=runs,
        descriptors=int(descriptors),
        transfers=len(memcpy),
        reserve_to_received=median(ours["reserved"]),
        send_to_received=median(ours["sent"]),
        write=median(ours["write"]),
        raw=min(median(seconds) for seconds in raw.values()),
        memcpy=median(memcpy),
    )


def _between(starts: Sequence[float], ends: Sequence[float]) -> list[float]:
    return [end - start for start, end in zip(starts, ends, strict=True)]


def path_table(figures: Sequence[Figures]) -> str:
    """GB/s, then ratios."""

    def times(f: Figures) -> tuple[float, ...]:
        return f.reserve_to_received, f.send_to_received, f.write

    ours = ["reserve→received", "send→received", "write"]
    rates = [
        [
            f"{f.backend}, {f.pages} in runs of {f.run}",
            f"{f.descriptors} / {f.runs}",
            *(f"{f.rate(seconds):.2f}" for seconds in (*times(f), f.raw, f.memcpy)),
        ]
        for f in figures
    ]
    ratios = [
        [
            f"{f.backend}, {f.pages} in runs of {f.run}",
            *(ratio(f.raw / seconds) for seconds in times(f)),
            ratio(f.memcpy / f.send_to_received),
        ]
        for f in figures
    ]
    return "\n\n".join(
        (
            table(["GB/s of pages", "descriptors / runs", *ours, "raw", "memcpy"], rates),
            table(["beside raw", *ours, "send→received / memcpy"], ratios),
        )
    )
