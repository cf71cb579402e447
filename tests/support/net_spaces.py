"""Network namespaces around a hub: whatever goes from one to another passes routes that can swallow it.

The caller of `net_spaces` stays in its own namespace and is the end CALLERS. Needs root and iproute2's `ip`.
`python -m tests.support.net_spaces NAMESPACE ARGS…` becomes another Python process inside a namespace.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CALLERS = "callers"
NAMED = Path("/var/run/netns")
_CLONE_NEWNET = 0x40000000
_HUB_HOST = 254
_IP_S = 20.0


class NoNetSpaces(Exception):
    """Namespaces cannot be made here; the text says why."""


class NetSpaces:
    """Made by `net_spaces`. Names of ends are short: interfaces bear them."""

    def __init__(self, ends: tuple[str, ...]) -> None:
        self._ends = (CALLERS, *ends)
        self._prefix = f"fp{os.getpid()}"
        # Of the block for measurements (RFC 2544), by process, so that two runs on one machine do not meet.
        self._net = f"198.{18 + os.getpid() % 2}.{os.getpid() // 2 % 256}"
        self._cuts: list[tuple[str, str]] = []

    def address(self, end: str) -> str:
        return f"{self._net}.{1 + self._ends.index(end)}"

    def space(self, end: str) -> str:
        """The name of an end's namespace."""
        return f"{self._prefix}-{end}"

    def cut(self, one: str, other: str) -> None:
        """Blackhole routes both ways: packets vanish, and nobody is told."""
        for way in ((one, other), (other, one)):
            self._rule("add", way)
            self._cuts.append(way)

    def heal(self) -> None:
        while self._cuts:
            self._rule("del", self._cuts.pop())

    def make(self) -> None:
        """Make all ends.

        Raises:
            NoNetSpaces: this machine or this user may not.
        """
        if shutil.which("ip") is None:
            raise NoNetSpaces("there is no `ip` command")
        hub = self.space("hub")
        try:
            _ip("netns", "add", hub)
            for end in self._ends:
                self._make_end(end, hub)
            _ip("netns", "exec", hub, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            self.cut(*self._ends[:2])
            self.heal()
        except (subprocess.CalledProcessError, PermissionError) as error:
            self.remove()
            raise NoNetSpaces(f"network namespaces cannot be made here: {error}") from None

    def remove(self) -> None:
        """Their interfaces go with them. Whatever was not made is no error."""
        for end in ("hub", *self._ends[1:]):
            if (NAMED / self.space(end)).exists():
                _ip("netns", "del", self.space(end))

    def _make_end(self, end: str, hub: str) -> None:
        own, centre, near = self.address(end), f"{self._net}.{_HUB_HOST}", f"{self._prefix}{end}"[:15]
        inside: tuple[str, ...] = ()
        _ip("-n", hub, "link", "add", end, "type", "veth", "peer", "name", near)
        if end == CALLERS:
            _ip("-n", hub, "link", "set", near, "netns", str(os.getpid()))
        else:
            inside = ("-n", self.space(end))
            _ip("netns", "add", self.space(end))
            _ip("-n", hub, "link", "set", near, "netns", self.space(end))
            _ip(*inside, "link", "set", "lo", "up")
        _ip("-n", hub, "address", "add", centre, "peer", own, "dev", end)
        _ip("-n", hub, "link", "set", end, "up")
        _ip(*inside, "address", "add", own, "peer", centre, "dev", near)
        _ip(*inside, "link", "set", near, "up")
        _ip(*inside, "route", "add", f"{self._net}.0/24", "via", centre)

    def _rule(self, verb: str, way: tuple[str, str]) -> None:
        sender, receiver = map(self.address, way)
        _ip("-n", self.space("hub"), "rule", verb, "from", sender, "to", receiver, "blackhole")


@contextlib.contextmanager
def net_spaces(*ends: str) -> Iterator[NetSpaces]:
    """Namespaces of those names until the context ends; whoever runs in them must have ended by then.

    Raises:
        NoNetSpaces: they cannot be had here.
    """
    spaces = NetSpaces(ends)
    spaces.make()
    try:
        yield spaces
    finally:
        spaces.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=_IP_S)


def main() -> None:
    """Enter the namespace, then exec the interpreter with the arguments behind its name."""
    with (NAMED / sys.argv[1]).open() as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
            sys.exit(f"cannot enter {sys.argv[1]}: {os.strerror(ctypes.get_errno())}")
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])


if __name__ == "__main__":
    main()
