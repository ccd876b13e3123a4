"""How prefill and decode meet, and how long each state of a request may last."""

from __future__ import annotations

from diptych.common_config.declare import OPEN, Element, Namespace, leaf
from diptych.common_config.namespaces.router import parse_url
from diptych.common_config.programs import Program

TRANSFER_BACKENDS = ("nixl", "mooncake")
"""Every transfer backend that crosses processes: the one list that flags are checked against."""


_FREE_PORTS = {Program.LOCAL: "gives its workers free ports"}
_NOT_PAIRED = {
    Program.LOCAL: "tells its own router about its workers",
    Program.COLOCATED: "does both phases itself; routers pair prefill and decode workers",
}


class Disagg(Namespace):
    """How prefill and decode meet, and how long each state of a request may last."""

    disaggregation_transfer_backend: str = leaf(
        "nixl",
        help="The library that moves KV pages.",
        choices=TRANSFER_BACKENDS,
    )
    disaggregation_bootstrap_port: int = leaf(
        8998,
        help="Port of the prefill's bootstrap service; 0 takes a free one.",
        ge=0,
        le=65535,
        refused_by=_FREE_PORTS,
    )
    disaggregation_advertise_host: str = leaf(
        OPEN,
        help="The address of this worker that its peers use.",
        open_means="--host where that is one address, else 127.0.0.1",
        metavar="HOST",
    )
    disaggregation_control_port: int = leaf(
        0,
        help="Port for control messages between schedulers; 0 takes a free one.",
        ge=0,
        le=65535,
        refused_by=_FREE_PORTS,
    )
    router_url: tuple[str, ...] = leaf(
        (),
        help="A router at which this worker registers once it is ready. Repeatable.",
        element=Element(parse_url, "URL"),
        refused_by=_NOT_PAIRED,
    )
    advertise_url: str | None = leaf(
        None,
        help="Where routers reach this worker's HTTP port.",
        open_means="--port on --disaggregation-advertise-host",
        metavar="URL",
        refused_by=_NOT_PAIRED,
    )
    registration_lease: float = leaf(
        15.0,
        help="Routers forget this worker when it hasn't renewed its registration for so long; it renews in "
        "every third of that.",
        unit="seconds",
        ge=1,
        le=86400,
        refused_by=_NOT_PAIRED,
    )
    cluster_secret: str | None = leaf(
        None,
        help="What prefill and decode workers of one cluster have in common: with it the bootstrap service "
        "and the control ports take nothing from anyone else. At least 16 characters.",
        open_means="whoever reaches those ports may use them",
        secret=True,
        metavar="SECRET",
    )
    handshake_timeout: float = leaf(
        10.0, help="Decode's patience for the prefill's bootstrap service.", unit="seconds", gt=0, le=86400
    )
    bootstrap_timeout: float = leaf(
        60.0,
        help="Prefill's patience for a request's destination, and decode's for free pages to reserve.",
        unit="seconds",
        gt=0,
        le=86400,
    )
    receive_timeout: float = leaf(
        120.0,
        help="Patience for a request's pages once they are reserved, on either side; prefill's queue counts.",
        unit="seconds",
        gt=0,
        le=86400,
    )
    transfer_timeout: float = leaf(
        30.0, help="Prefill's patience for its last pages in flight.", unit="seconds", gt=0, le=86400
    )
    retracted_timeout: float = leaf(
        600.0,
        help="Decode's patience for the pages of a request that it has parked on the host.",
        unit="seconds",
        gt=0,
        le=86400,
    )
    max_optimistic_fraction: float = leaf(
        0.5,
        help="Share of prefill's KV pool for prompts that are computed before decode has reserved pages for "
        "them. They give way to others. 0 computes only prompts whose destination is known.",
        ge=0,
        le=1,
    )
    max_receiving_fraction: float = leaf(
        0.5,
        help="Share of decode's KV pool, and of its --max-running-requests, that may wait for one prefill "
        "worker to deliver. A single request is always let in.",
        gt=0,
        le=1,
    )
    heartbeat_interval: float = leaf(
        3.0, help="Time between signs of life; two missed ones mean dead.", unit="seconds", ge=0.05, le=3600
    )
    enable_kv_checksum: bool = leaf(
        False,
        help="Decode compares checksums of every page and of what comes with them, and fails a request that "
        "arrives damaged. Set it on decode workers: prefill obliges whoever asks, whatever its own setting.",
    )
    enable_fault_injection: bool = leaf(
        False,
        help="Serve /faults, by which messages and page writes get lost, late, damaged or held, and steps "
        "held up. For tests and drills.",
    )
    fault_injection_seed: int = leaf(0, help="Of the random numbers that decide which faults happen.")
    fault_injection_rules: str | None = leaf(
        None,
        help="Faults from the start: a JSON list of rules, as in the body of POST /faults.",
        open_means="none until POST /faults",
        metavar="JSON",
    )
    nixl_ucx_tls: str | None = leaf(
        None,
        help="UCX transports for NIXL, as in UCX_TLS.",
        open_means="chosen for the machine",
        metavar="TLS",
    )
    mooncake_protocol: str = leaf(
        "tcp", help="How Mooncake reaches peers. The same on both sides.", choices=("tcp", "rdma")
    )
    disaggregation_ib_device: str | None = leaf(
        None,
        help="RDMA devices for Mooncake, comma-separated.",
        open_means="every device of the machine",
        metavar="DEVICES",
    )
