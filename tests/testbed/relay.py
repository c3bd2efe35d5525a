"""A TCP relay on loopback that can be cut: how a network fails between two programs that are both well."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

CHUNK = 65536


class Relay:
    """Passes bytes between its own port and ``target``.

    Attributes:
        port: where clients connect.
        target: port that connections go to.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._refuses = self._swallows = False
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
            try:
                server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=(source, sink), name="relay", daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(CHUNK):
                while self._swallows:
                    time.sleep(0.05)
                sink.sendall(data)
        except OSError:
            pass
        with self._lock:
            self._open.discard(source)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
