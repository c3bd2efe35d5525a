"""A TCP relay on loopback that can be cut: how a network fails between two programs that are both well.

With several targets it takes turns among those that accept connections, as the address of a Service does.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

CHUNK = 65536


class Relay:
    """Passes bytes between its own port and ``targets``.

    Attributes:
        port: where clients connect.
        targets: ports that connections go to, the next one first.
    """

    def __init__(self, *targets: int) -> None:
        self.targets = list(targets)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._refuses = self._swallows = False
        self._era = 0
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    @property
    def address(self) -> str:
        """`host:port` for clients."""
        return f"127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Every connection is torn, new ones at once."""
        self._refuses = True
        self._tear()
        try:
            yield
        finally:
            self._refuses = False

    @contextlib.contextmanager
    def swallowing(self) -> Iterator[None]:
        """Connections stay open and nothing comes through, as behind a firewall that drops packets."""
        self._swallows = True
        try:
            yield
        finally:
            self._swallows = False
            self._tear()

    def silence(self) -> None:
        """What is connected now stays open and dead for good; new connections work."""
        self._era += 1

    def close(self) -> None:
        """Stop."""
        self._listener.close()
        self._tear()

    def _tear(self) -> None:
        with self._lock:
            taken, self._open = self._open, set()
        for one in taken:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refuses:
                client.close()
                continue
            server = self._connect()
            if server is None:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            era, ended = self._era, list[socket.socket]()
            for source, sink in ((client, server), (server, client)):
                arguments = (source, sink, era, ended)
                threading.Thread(target=self._pass, args=arguments, name="relay", daemon=True).start()

    def _connect(self) -> socket.socket | None:
        for _ in self.targets:
            self.targets.append(target := self.targets.pop(0))
            try:
                server = socket.create_connection(("127.0.0.1", target), timeout=5)
            except OSError:
                continue
            server.settimeout(None)
            return server
        return None

    def _pass(self, source: socket.socket, sink: socket.socket, era: int, ended: list[socket.socket]) -> None:
        try:
            while data := source.recv(CHUNK):
                while self._swallows:
                    time.sleep(0.05)
                if era != self._era:
                    continue
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open.discard(source)
            ended.append(source)
            both = len(ended) == 2
        if both:
            source.close()
            sink.close()
