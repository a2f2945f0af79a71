"""What a connection may cost: `protocol(most)` is uvicorn's HTTP/1.1 with limits of its own.

At most so many connections are open; one more is told 503 with Retry-After and closed. One that does not say what it
asks for within `HEAD_S`, or does not read what it is sent for `STALL_S`, is closed, so that clients that are slow, or
that send nothing, hold no file descriptors for long. Leaves out bodies (`server.Server.body`).
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

HEAD_S, STALL_S = 30.0, 120.0
OWN = 64
"""File descriptors of the server itself: pipes to workers, files, sockets that listen."""
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def most_connections() -> int:
    """Counts the connections that the process has file descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if soft == resource.RLIM_INFINITY else max(1, soft - OWN)


def protocol(most: int, head_s: float = HEAD_S, stall_s: float = STALL_S) -> Any:
    """A class of asyncio protocols for `uvicorn.Config(http=…)`."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Limited(H11Protocol):
        """One connection, whose time is limited."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.head: asyncio.TimerHandle | None = None
            self.stall: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.write(FULL)
                transport.close()
                return
            self.head = self.loop.call_later(head_s, transport.abort)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            answers = self.cycle is not None and not self.cycle.response_complete
            if answers and self.head is not None:
                self.head.cancel()
                self.head = None
            elif not answers and self.head is None:  # a next request, or the rest of one that is answered already
                self.head = self.loop.call_later(head_s, self.transport.abort)

        def pause_writing(self) -> None:
            super().pause_writing()
            self.stall = self.loop.call_later(stall_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._end("stall")

        def connection_lost(self, exc: Exception | None) -> None:
            self._end("head", "stall")
            super().connection_lost(exc)

        def _end(self, *names: str) -> None:
            for name in names:
                if (timer := getattr(self, name)) is not None:
                    timer.cancel()
                    setattr(self, name, None)

    return Limited
