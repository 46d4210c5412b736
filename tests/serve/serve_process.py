"""Run a server on the null device: serve_process.py JSON, as serve_drive.Process does."""

import asyncio
import json
import sys

from tandem.cli.serve import _loop_factory, _say
from tandem.config import Settings
from tandem.serve.options import ServeOptions
from tandem.serve.server import serve


def main() -> int:
    start = json.loads(sys.argv[1])
    options = ServeOptions.from_dict(start["options"])
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        engine = {"make": "serve_drive:make_null", "options": start["engine"]}
        return runner.run(serve(Settings(device="null"), options, keys=start["keys"], say=_say, start=engine))


if __name__ == "__main__":
    sys.exit(main())
