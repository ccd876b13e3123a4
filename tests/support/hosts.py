"""Two "machines" on one: network namespaces joined by a veth pair, and each to the test by another."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import Launched

ON_HOST = Path(__file__).with_name("on_host.py")
LINK = "link0"
"""The interface that joins the two, in both."""
LEG = "leg0"
"""The interface by which the test reaches a host, whatever becomes of the link."""
RANGE = ipaddress.ip_network("198.18.0.0/16")
"""Reserved for tests of network devices (RFC 2544): no real network has it."""


def ip(*arguments: str) -> str:
    """What `ip` printed; fails with what it complained about."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"
    return done.stdout


class LaunchedElsewhere(Launched):
    """Through a launcher, which passes signals on and ends as the command does. Listens on every address."""

    def __init__(
        self, host: Host, command: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> None:
        self._address = host.address
        module = f"diptych.launch.{command.removeprefix('launch-')}"
        super().__init__(
            command,
            *(host.netns, "-m", module, *arguments),
            *("--host", "0.0.0.0", "--disaggregation-advertise-host", host.address),
            script=ON_HOST,
            environment=environment,
        )

    def ready(self) -> LaunchedElsewhere:
        super().ready()
        self.url = self.url.replace("0.0.0.0", self._address)
        return self


class Host:
    """One network namespace. `address` is its end of the link."""

    def __init__(self, netns: str, address: str) -> None:
        self.netns = netns
        self.address = address

    def ip(self, *arguments: str) -> str:
        return ip("-n", self.netns, *arguments)

    def launch(
        self, command: str, *arguments: str, environment: dict[str, str] | None = None
    ) -> LaunchedElsewhere:
        """A worker's command, as an operator with several machines would give it."""
        return LaunchedElsewhere(self, command, *arguments, environment=environment)

    def bytes_received(self) -> int:
        """Over the link, since it was made."""
        (link,) = json.loads(self.ip("-json", "-statistics", "link", "show", LINK))
        received: int = link["stats64"]["rx"]["bytes"]
        return received

    @contextlib.contextmanager
    def link_down(self) -> Iterator[None]:
        """This end is switched off, and the other has no carrier."""
        self.ip("link", "set", LINK, "down")
        try:
            yield
        finally:
            self.ip("link", "set", LINK, "up")


@contextlib.contextmanager
def packets_lost(sender: Host, receiver: Host) -> Iterator[None]:
    """Everything sent from one to the other is lost somewhere between them, and neither is told."""
    (link,) = json.loads(receiver.ip("-json", "link", "show", LINK))
    sender.ip(
        "neigh", "replace", receiver.address, "lladdr", link["address"], "nud", "permanent", "dev", LINK
    )
    receiver.ip("address", "delete", f"{receiver.address}/30", "dev", LINK)
    try:
        yield
    finally:
        receiver.ip("address", "add", f"{receiver.address}/30", "dev", LINK)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that see each other over the link alone. Names and addresses are this process's, and all are
    removed at the end. Skips the test where that takes rights that the user lacks."""
    if os.geteuid() != 0:
        pytest.skip("this machine has no root user for its tests, and network namespaces need one")
    _remove_what_killed_runs_left()
    addresses = [str(address) for address in _free_subnet()]
    first, second = (Host(f"dp{os.getpid()}{end}", addresses[1 + i]) for i, end in enumerate("ab"))
    with contextlib.ExitStack() as cleanup:
        for host, here, there in ((first, *addresses[5:7]), (second, *addresses[9:11])):
            ip("netns", "add", host.netns)
            cleanup.callback(ip, "netns", "delete", host.netns)
            host.ip("link", "set", "lo", "up")
            ip("link", "add", host.netns, "type", "veth", "peer", LEG, "netns", host.netns)
            # It goes with its namespace too, but not always before the next test begins.
            cleanup.callback(ip, "link", "delete", host.netns)
            host.ip("address", "add", f"{there}/30", "dev", LEG)
            host.ip("link", "set", LEG, "up")
            ip("address", "add", f"{here}/30", "dev", host.netns)
            ip("link", "set", host.netns, "up")
            ip("route", "add", f"{host.address}/32", "via", there, "dev", host.netns)
        first.ip("link", "add", LINK, "type", "veth", "peer", LINK, "netns", second.netns)
        for host in (first, second):
            host.ip("address", "add", f"{host.address}/30", "dev", LINK)
            host.ip("link", "set", LINK, "up")
        yield first, second


def _remove_what_killed_runs_left() -> None:
    for line in ip("netns", "list").splitlines():
        name = line.split()[0]
        owner = re.fullmatch(r"dp(\d+)[ab]", name)
        if owner and not Path("/proc", owner[1]).exists():
            ip("netns", "delete", name)


def _free_subnet() -> ipaddress.IPv4Network:
    """16 addresses that no route of this machine names, so that test runs don't meet."""
    taken = set(ip("-4", "route", "show", "table", "all").replace("/", " ").split())
    candidates = list(RANGE.subnets(new_prefix=28))
    start = os.getpid() % len(candidates)
    for subnet in candidates[start:] + candidates[:start]:
        if not any(str(address) in taken for address in subnet):
            return subnet
    raise AssertionError(f"every network of {RANGE} has a route here")
