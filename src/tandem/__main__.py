"""The program ``tandem``, also as python -m tandem. It knows how a process begins and ends, not the commands."""

import sys

EXIT_INTERRUPT = 130


def program() -> int:
    """Run the command line. Ctrl-C ends the process with 130 at any moment, and in silence."""
    try:
        from tandem.cli import main

        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal without the model's letters is no error
        status = main()
    except KeyboardInterrupt:
        status = EXIT_INTERRUPT
    if status == EXIT_INTERRUPT:
        _leave_at_once()
    return status


def _leave_at_once() -> None:
    """End without Python's tidying up, once children are ended and what was said is out.

    A thread may still be loading a model, in native code; Python's exit would unwind it there, and abort the process.
    """
    import contextlib
    import os
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing else ():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(EXIT_INTERRUPT)


if __name__ == "__main__":
    sys.exit(program())
