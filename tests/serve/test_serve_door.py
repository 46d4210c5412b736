"""The door when it is shut: connections that are just coming in."""

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvicorn
import uvloop

from tandem.serve.border import Border
from tandem.serve.door import HttpServer


async def nothing(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nobody asks")


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("num_turns", range(5))
def test_who_comes_in_while_the_door_shuts_is_not_waited_for(
    num_turns: int, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Or else a server that ends waits for it for its last second, and logs an error."""

    async def shut() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(nothing, log_config=None, lifespan="off", ws="none")
        config.load()
        server = HttpServer(config, Border(), listener)
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        with socket.create_connection(listener.getsockname()) as client:
            server._knocked()
            for _ in range(num_turns):
                await asyncio.sleep(0)
            server.close()
            for connection in list(server.server_state.connections):  # as uvicorn does
                connection.shutdown()
            await asyncio.sleep(0.05)
            assert not server.server_state.connections and not server.border.open and not server.border.waiting
            client.settimeout(2)
            assert client.recv(1) == b""

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(shut())
