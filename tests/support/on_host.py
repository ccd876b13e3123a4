"""`on_host.py NETNS ARGUMENTS…`: run Python with these arguments as if on another machine.

The process gets the network namespace of that name, that host's boot id, and a pid namespace of its own: it
can see no process of the other host, prove none dead and reach nobody's memory. This launcher stays outside:
it passes signals on and ends as the program does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import uuid

CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def enter(netns: str) -> None:
    """This process moves to the network; its children also get pids of their own."""
    descriptor = os.open(f"/run/netns/{netns}", os.O_RDONLY)
    check(libc.setns(descriptor, CLONE_NEWNET))
    os.close(descriptor)
    check(libc.unshare(CLONE_NEWPID | CLONE_NEWNS))


def change_boot_id(netns: str) -> None:
    """All processes of a host have the same."""
    with tempfile.NamedTemporaryFile("w") as boot_id:
        boot_id.write(f"{uuid.uuid5(uuid.NAMESPACE_DNS, netns)}\n")
        boot_id.flush()
        check(libc.mount(boot_id.name.encode(), b"/proc/sys/kernel/random/boot_id", None, MS_BIND, None))


def become(netns: str, arguments: list[str]) -> None:
    """In the child: dies with its launcher, and everything it started dies with it."""
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    check(libc.mount(b"proc", b"/proc", b"proc", 0, None))
    # Transfer libraries look for network devices here, and a mount shows those of who made it.
    check(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))
    change_boot_id(netns)
    os.execv(sys.executable, [sys.executable, *arguments])


def main(netns: str, *arguments: str) -> int:
    enter(netns)
    forwarded = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
        become(netns, list(arguments))
    for number in forwarded:
        signal.signal(number, lambda n, _: os.kill(child, n))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
