"""A forked process that tries grammars one after another, each for a slice of processor time. It knows no lines.

Forked from a process that has read the tokenizer, so it is there within 1 to 5 ms. The slice is the kernel's to watch
(a timer whose signal ends the process), since nothing but a kill ends a compilation.
"""

import os
import resource
import signal
import sys
from collections.abc import Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from tandem.parent import die_with_parent
from tandem.sampling.grammar_follow import Follower, Tokenizers
from tandem.sampling.grammar_limits import GrammarLimits
from tandem.sampling.grammar_text import UnfitError, first_line


class OverdueError(Exception):
    """The slice was not enough."""


class GoneError(Exception):
    """The process has ended of what it did: it took more memory than it may."""


class KilledError(Exception):
    """Somebody else has ended the process: the system, for want of memory, or an operator."""


class Child:
    """limit_bytes: memory that it may take for data. niceness: how much further it steps back.

    inherited   the parent's connections, which are none of its business.
    """

    def __init__(
        self, tokenizers: Tokenizers, limit_bytes: int, niceness: int, inherited: Iterable[Connection]
    ) -> None:
        self.limit_bytes = limit_bytes
        self.connection, theirs = Pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            die_with_parent(parent)
            _serve(theirs, tokenizers, limit_bytes, niceness, (self.connection, *inherited))
        theirs.close()

    def begin(self, tokenizer: int, kind: str, text: str, limits: GrammarLimits, slice_s: float) -> None:
        """Raises OSError if the process is gone."""
        self.connection.send((tokenizer, kind, text, limits, slice_s))

    def result(self) -> str | None:
        """Why the grammar is refused; None: it fits. Raises Overdue-, Gone- or KilledError; it has ended then."""
        try:
            reason: str | None = self.connection.recv()
        except (EOFError, OSError):
            how = {-signal.SIGPROF: OverdueError, -signal.SIGKILL: KilledError}
            raise how.get(self.end(), GoneError) from None
        return reason

    def end(self) -> int:
        """End it, if it has not ended; its exit code, or the signal that it ended by, negative."""
        os.kill(self.pid, signal.SIGKILL)  # no other has its number: it has not been waited for
        _, status = os.waitpid(self.pid, 0)
        self.connection.close()
        return os.waitstatus_to_exitcode(status)


def _serve(
    connection: Connection, tokenizers: Tokenizers, limit_bytes: int, niceness: int, inherited: Iterable[Connection]
) -> None:
    """Until the parent closes its end, or is gone. Does not return."""
    try:
        for other in inherited:
            other.close()
        _step_back(limit_bytes, niceness)
        while True:
            tokenizer, kind, text, limits, slice_s = connection.recv()
            signal.setitimer(signal.ITIMER_PROF, slice_s)
            reason = try_grammar(tokenizers.get(tokenizer), kind, text, limits)
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send(reason)
    except (EOFError, OSError, MemoryError):
        pass
    finally:
        os._exit(0)


def try_grammar(tokenizer: tuple[Any, int, tuple[int, ...]], kind: str, text: str, limits: GrammarLimits) -> str | None:
    """Why it is refused; None: it fits."""
    made, num_logits, eos_ids = tokenizer
    try:
        Follower.compile(made, num_logits, kind, text, limits).try_steps(eos_ids)
    except UnfitError as error:
        return str(error)
    except MemoryError:
        raise
    except BaseException as error:  # a panic of the library is a BaseException
        print(f"grammar trial: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return first_line(str(error)) or "the library for grammars failed"
    return None


def _step_back(limit_bytes: int, niceness: int) -> None:
    """Where a system has no such thing, or forbids it, the slice alone ends what goes on."""
    try:
        os.nice(niceness)
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    except (OSError, ValueError):
        pass
