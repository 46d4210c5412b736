"""An engine that makes tokens faster than they can be handed on: health, signals and newcomers have their turn."""

import http.client
import json
import signal
import subprocess
import sys
import time

from serve_drive import Process

NUM_STREAMS = 64
# In a process of its own, so that what it burns does not look like the server's delay.
READER = """
import selectors, socket, sys
port, streams, body = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
head = b"POST /v1/completions HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-type: application/json\\r\\n"
head += b"content-length: %d\\r\\n\\r\\n"
selector, last = selectors.DefaultSelector(), {}
for _ in range(streams):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head % len(body) + body)
    selector.register(connection, selectors.EVENT_READ)
while selector.get_map():
    for key, _ in selector.select():
        data = key.fileobj.recv(1 << 18)
        if data:
            last[key.fileobj] = data
        else:
            selector.unregister(key.fileobj)
            key.fileobj.close()
print(sum(b'"draining"' in data for data in last.values()))
"""


def get(port: int, path: str) -> tuple[int, float, bytes]:
    """Status, time and body, on a connection of its own."""
    began_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found[0], time.monotonic() - began_s, found[1]


def test_health_and_signals_come_first() -> None:
    """64 streams of an unpaced device: health took seconds here, and a drain of 1 s took seven.

    Measured alone: 40 ms at the 99th percentile; the bounds leave room for two busy cores.
    """
    body = json.dumps({"prompt": "x", "max_tokens": 32_000, "ignore_eos": True, "stream": True})
    options = {"drain_timeout": 1.0}
    engine = {"max_model_len": 32768, "max_num_seqs": NUM_STREAMS, "kv_cache_memory": 36 << 30, "prefix_cache": False}
    with Process(options=options, **engine) as server:
        port = int(server.url.rsplit(":", 1)[1])
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(port), str(NUM_STREAMS), body], stdout=subprocess.PIPE, text=True
        )
        try:
            while json.loads(get(port, "/load")[2])["requests"] < NUM_STREAMS:
                time.sleep(0.05)
            time.sleep(0.5)
            answers = [get(port, "/health") for _ in range(50)]
            assert {status for status, _, _ in answers} == {200}
            waits = sorted(wait_s for _, wait_s, _ in answers)
            assert waits[25] < 0.1 and waits[-2] < 0.5, waits[-5:]
            assert json.loads(get(port, "/load")[2])["requests"] == NUM_STREAMS, "the flood was over too early"
            server.signal(signal.SIGTERM)
            began_s = time.monotonic()
            while get(port, "/ready")[0] == 200:
                pass
            assert time.monotonic() - began_s < 0.5
            told = reader.communicate(timeout=20)[0]
            assert server.wait() == 0 and time.monotonic() - began_s < 1.0 + 2.0
            assert int(told) == NUM_STREAMS, "each stream ends with an error event"
        finally:
            reader.kill()
            reader.wait()
