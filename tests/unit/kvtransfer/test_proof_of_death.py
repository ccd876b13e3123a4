"""Only proof that a process has ended gives quarantined pages back."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from diptych.kvtransfer.bootstrap.client import register
from diptych.kvtransfer.bootstrap.route import RankRoute
from diptych.kvtransfer.identity import Identity
from diptych.kvtransfer.probe import Peer, proof_of_death
from diptych.kvtransfer.quarantine import Held, Quarantine
from diptych.kvtransfer.wire import PROTOCOL_VERSION

from .conftest import Service, make_fingerprint


@pytest.fixture
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def identity_of_child(script: str) -> tuple[subprocess.Popen[bytes], Identity]:
    code = (
        "import msgspec,sys; from diptych.kvtransfer.identity import Identity;"
        "sys.stdout.buffer.write(msgspec.json.encode(Identity.current())+b'\\n'); sys.stdout.flush();"
        + script
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert child.stdout is not None
    return child, msgspec.json.decode(child.stdout.readline(), type=Identity)


def test_every_process_start_is_someone_else() -> None:
    assert Identity.current().instance_id != Identity.current().instance_id


def test_killed_process_is_known_dead_even_as_a_zombie(listener: str) -> None:
    child, identity = identity_of_child("sys.stdin.read()")
    assert not identity.is_known_dead()
    assert proof_of_death(Peer(identity, listener)) is None
    child.kill()
    assert child.stdout is not None
    child.stdout.read()  # ends when the process has let go of its files
    child.wait()
    assert identity.is_known_dead()
    assert "has ended" in str(proof_of_death(Peer(identity, listener)))


@pytest.mark.parametrize(
    "elsewhere",
    [{"boot_id": "another host"}, {"pid_namespace": "pid:[1]"}, {"start_ticks": 0}, {"boot_id": ""}],
)
def test_pid_of_another_host_or_namespace_proves_nothing(elsewhere: dict[str, object]) -> None:
    identity = msgspec.structs.replace(Identity.current(), pid=2**22 - 1, **elsewhere)
    assert not identity.is_known_dead()


def test_reused_pid_is_not_taken_for_the_process() -> None:
    identity = Identity.current()
    later = msgspec.structs.replace(identity, start_ticks=identity.start_ticks + 1)
    assert later.is_known_dead()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def of_another_host() -> Identity:
    return msgspec.structs.replace(Identity.current(), boot_id="another host")


def test_refused_control_port_is_proof_on_this_host_and_an_unreachable_one_is_not() -> None:
    here = msgspec.structs.replace(Identity.current(), pid_namespace="pid:[1]")
    assert "refuses" in str(proof_of_death(Peer(here, f"tcp://127.0.0.1:{free_port()}")))
    assert proof_of_death(Peer(here, "tcp://no-such-host.invalid:1")) is None


def test_refused_control_port_of_another_host_may_be_its_firewall() -> None:
    refusing = f"tcp://127.0.0.1:{free_port()}"
    assert proof_of_death(Peer(of_another_host(), refusing)) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        # Takes the connection and closes it: alive, though no service that could say more.
        server.listen()
        bootstrap = server.getsockname()
        threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(2)], daemon=True).start()
        assert proof_of_death(Peer(of_another_host(), refusing, bootstrap)) is None
    assert "bootstrap service" in str(
        proof_of_death(Peer(of_another_host(), refusing, ("127.0.0.1", free_port())))
    )


def test_bootstrap_service_is_a_witness_of_its_prefill_worker() -> None:
    service = Service()
    bootstrap = ("127.0.0.1", service.port)
    registered = of_another_host()
    refusing = f"tcp://127.0.0.1:{free_port()}"
    route = RankRoute(
        version=PROTOCOL_VERSION,
        worker_id="w",
        rank=0,
        world_size=1,
        identity=registered,
        control_address=refusing,
        fingerprint=make_fingerprint(),
        backend="fake",
    )
    register(*bootstrap, route, timeout=5.0)
    assert proof_of_death(Peer(registered, refusing, bootstrap)) is None
    replaced = Peer(of_another_host(), refusing, bootstrap)
    assert proof_of_death(replaced) == "another worker has taken its place"
    service.stop()


def held(room: int, peer: Peer) -> Held:
    return Held(room, 7, 3, peer, "why", 500, ask_at=10.0)


def test_quarantine_releases_on_the_right_word_only() -> None:
    peer = Peer(Identity.current(), "tcp://h:1")
    quarantine = Quarantine(ask_interval=2.0, settle=1.0)
    quarantine.add(held(1, peer))
    quarantine.add(held(2, peer))
    assert quarantine.num_pages == 6
    quarantine.drained("someone else", 1, 7, True, 5.0)
    quarantine.drained(peer.instance_id, 1, 8, True, 5.0)
    quarantine.drained(peer.instance_id, 3, 7, True, 5.0)
    assert quarantine.released(100.0) == []
    quarantine.drained(peer.instance_id, 1, 7, True, 5.0)
    assert [h.room for h in quarantine.released(5.0)] == [1]
    assert quarantine.num_pages == 3


def test_unclean_drain_and_death_wait_for_what_is_still_in_a_socket() -> None:
    peer = Peer(Identity.current(), "tcp://h:1")
    quarantine = Quarantine(ask_interval=2.0, settle=1.0)
    quarantine.add(held(1, peer))
    quarantine.add(held(2, peer))
    quarantine.drained(peer.instance_id, 1, 7, False, 5.0)
    quarantine.dead(peer.instance_id, 5.5)
    assert quarantine.next_deadline() == 6.0
    assert [h.room for h in quarantine.released(6.0)] == [1]
    assert [h.room for h in quarantine.released(6.5)] == [2]


def test_what_another_host_still_sends_after_an_outage_lands_in_quarantined_pages() -> None:
    peer = Peer(of_another_host(), "tcp://h:1")
    quarantine = Quarantine(ask_interval=2.0, settle=1.0)
    quarantine.add(held(1, peer))  # failed at 8, and the network was there at 6
    quarantine.dead(peer.instance_id, 50.0)
    assert quarantine.released(50.0 + 44.0) == []
    assert len(quarantine.released(50.0 + 44.0 + 1.0)) == 1
    quarantine.add(held(2, peer))
    quarantine.drained(peer.instance_id, 2, 7, False, 9999.0)
    assert len(quarantine.released(9999.0 + 121.0)) == 1


def test_prefill_is_asked_again_and_again() -> None:
    peer = Peer(Identity.current(), "tcp://h:1")
    quarantine = Quarantine(ask_interval=2.0, settle=1.0)
    quarantine.add(held(1, peer))
    assert quarantine.to_ask(9.0) == []
    assert len(quarantine.to_ask(10.0)) == 1
    assert quarantine.to_ask(11.0) == []
    assert len(quarantine.to_ask(12.0)) == 1
