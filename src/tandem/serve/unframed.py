"""Answers to HTTP/1.0 clients, which know no chunks: the end of the connection ends an answer without a length.

It knows uvicorn's account of one request (a cycle); it does not know routes or connections.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def without_chunks(app: Any, cycle: RequestResponseCycle) -> Any:
    """The ASGI application, for one request. uvicorn would send chunks, which RFC 9112, 6.1 forbids here, and interim
    answers, which RFC 9110, 15.2 does."""
    cycle.waiting_for_100_continue = False

    async def unframed(scope: Any, receive: Any, send: Any) -> None:
        has_length = True

        async def send_unframed(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                has_length = b"content-length" in names or scope["method"] == "HEAD"
                if not has_length:
                    cycle.chunked_encoding = cycle.keep_alive = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))  # as much as comes, each time
            await send(message)

        await app(scope, receive, send_unframed)

    return unframed
