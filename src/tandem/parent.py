"""A process that ends with the one that started it, however that ends. It does not know what either does."""

import contextlib
import ctypes
import os
import signal

ORPHAN_STATUS = 70

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone; end it now if that is so already. Linux only.

    parent: the process that started this one. The kernel watches the *thread* that did (PR_SET_PDEATHSIG, prctl(2)),
    so that thread must live as long as this process may. The signal ends processes that are stopped, too.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before the kernel was told
        os._exit(ORPHAN_STATUS)
