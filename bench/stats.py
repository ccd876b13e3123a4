"""The arithmetic of a serving benchmark: times of one request, and what many of them amount to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class RequestRecord(msgspec.Struct, kw_only=True):
    """What a client saw of one request. Times are seconds on one monotonic clock."""

    input_tokens: int
    output_tokens: int = 0
    """As the server counts them (usage), not as events were counted."""
    sent: float
    token_times: list[float] = []
    """Arrival of each event that carried output."""
    finished: float = 0.0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token: from sending to the first event with output."""
        return self.token_times[0] - self.sent

    @property
    def latency(self) -> float:
        """From sending to the last event with output."""
        return self.token_times[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: gaps between successive events with output."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


class Goodput(msgspec.Struct, kw_only=True):
    """Targets in seconds; None: not a target."""

    ttft: float | None = None
    tpot: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        """A failed request meets nothing; a request of one token has no TPOT to miss."""
        if record.error is not None:
            return False
        if self.ttft is not None and record.ttft > self.ttft:
            return False
        tpot = record.tpot
        return self.tpot is None or tpot is None or tpot <= self.tpot


def parse_goodput(words: Sequence[str]) -> Goodput:
    """`["ttft:200", "tpot:50"]`, milliseconds. Raises ValueError with the reason."""
    targets: dict[str, float] = {}
    for word in words:
        name, colon, value = word.partition(":")
        if name not in ("ttft", "tpot") or not colon:
            raise ValueError(f"{word!r} is not a target; write ttft:MILLISECONDS or tpot:MILLISECONDS")
        if name in targets:
            raise ValueError(f"two targets for {name}")
        try:
            milliseconds = float(value)
        except ValueError:
            raise ValueError(f"{value!r} in {word!r} is not a number of milliseconds") from None
        if not 0 < milliseconds < math.inf:
            raise ValueError(f"{word!r} must be above 0 milliseconds")
        targets[name] = milliseconds / 1000
    return Goodput(**targets)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between closest ranks (numpy's default method). Raises ValueError if empty."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


class Distribution(msgspec.Struct, kw_only=True):
    mean: float
    p50: float
    p99: float
    max: float


def distribution(values: Sequence[float]) -> Distribution | None:
    """None for no values."""
    if not values:
        return None
    mean = sum(values) / len(values)
    return Distribution(mean=mean, p50=percentile(values, 50), p99=percentile(values, 99), max=max(values))


def steady_decode_rate(records: Sequence[RequestRecord]) -> float | None:
    """Output tokens per second of all requests together while every one of them is decoding: from the last
    first token to the first last token. None when there is no such window."""
    ok = [r for r in records if r.error is None and r.output_tokens >= 2 and len(r.token_times) >= 2]
    if not ok or len(ok) < len(records):
        return None
    start = max(r.token_times[0] for r in ok)
    end = min(r.token_times[-1] for r in ok)
    if end <= start:
        return None
    tokens = 0.0
    for record in ok:
        # An event may carry more than one token; spread the server's count over the events.
        per_event = (record.output_tokens - 1) / (len(record.token_times) - 1)
        tokens += per_event * sum(start < t <= end for t in record.token_times)
    return tokens / (end - start)


class Summary(msgspec.Struct, kw_only=True):
    """One benchmark run. Times in seconds, rates per second."""

    requests: int
    failed: int
    duration: float
    input_tokens: int
    output_tokens: int
    request_rate: float
    input_rate: float
    output_rate: float
    steady_decode_rate: float | None
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    latency: Distribution | None
    goodput: float | None
    """Requests per second that meet the targets; None without targets."""
    goodput_share: float | None
    errors: list[str]


def summarize(records: Sequence[RequestRecord], duration: float, targets: Goodput | None = None) -> Summary:
    """`duration`: from the first request sent to the last answer finished, in seconds."""
    ok = [r for r in records if r.error is None]
    met = None if targets is None else sum(targets.met_by(r) for r in records)
    input_tokens, output_tokens = sum(r.input_tokens for r in ok), sum(r.output_tokens for r in ok)
    return Summary(
        requests=len(records),
        failed=len(records) - len(ok),
        duration=duration,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        request_rate=len(ok) / duration,
        input_rate=input_tokens / duration,
        output_rate=output_tokens / duration,
        steady_decode_rate=steady_decode_rate(records),
        ttft=distribution([r.ttft for r in ok]),
        itl=distribution([gap for r in ok for gap in r.itls]),
        tpot=distribution([t for r in ok if (t := r.tpot) is not None]),
        latency=distribution([r.latency for r in ok]),
        goodput=None if met is None else met / duration,
        goodput_share=None if met is None else met / len(records),
        errors=sorted({r.error for r in records if r.error is not None})[:5],
    )
