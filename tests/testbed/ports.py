"""Free TCP ports on loopback."""

import random
import socket

_RANGE = range(18000, 30000)
"""Below what the kernel gives to connections and to listeners that name no port, and below the ports of Services: a
port of that range is often taken by somebody else before the program that it was chosen for listens."""

_given: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Different ports that nobody uses now and that this process has not been given before.

    Raises:
        OSError: if there are not as many.
    """
    ports: list[int] = []
    # In any order, so that test runs side by side do not choose alike.
    for port in random.sample(_RANGE, len(_RANGE)):
        if len(ports) == count:
            break
        if port not in _given and _is_free(port):
            ports.append(port)
            _given.add(port)
    if len(ports) < count:
        raise OSError(f"no {count} free ports from {_RANGE.start} to {_RANGE.stop}")
    return ports


def _is_free(port: int) -> bool:
    """Whether a program could listen on the port, on any address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def is_open(port: int, host: str = "127.0.0.1") -> bool:
    """Whether somebody listens on the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0
