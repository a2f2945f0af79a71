"""Connections that say nothing, or do not read, are closed; one too many is told so."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the room of the engine needs it")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")

from gnomon.serve.connections import protocol  # noqa: E402

pytestmark = pytest.mark.torch
HEAD_S, STALL_S, MOST = 0.2, 0.2, 3
ASKED = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """32 MiB, more than sockets hold."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for left in range(31, -1, -1):
        await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": left > 0})


async def seconds_to_end(begin: bytes, port: int) -> float:
    """Until the server closes a connection that says so much and reads nothing before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
    writer.write(begin)
    since = time.perf_counter()
    try:
        while not begin or await reader.read(1 << 16):
            if not begin:
                assert await reader.read(1) == b""
                break
    except ConnectionResetError:
        pass
    finally:
        writer.close()
    return time.perf_counter() - since


def test_who_holds_a_connection_for_nothing_loses_it() -> None:
    async def tried() -> None:
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", http=protocol(MOST, HEAD_S, STALL_S))
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        for begin in (b"", b"GET / HT", ASKED[:-2]):
            assert HEAD_S * 0.9 < await seconds_to_end(begin, port) < 5
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASKED)
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.1)
        assert server.server_state.connections
        await asyncio.sleep(STALL_S + 0.3)
        assert not server.server_state.connections
        writer.close()
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert b"503" in await reader.read()
        for _, one in (*held, (reader, writer)):
            one.close()
        server.should_exit = True
        await serving

    asyncio.run(tried())
