"""Processes that end with the one that started them."""

import os
import subprocess
import sys

from tandem.parent import ORPHAN_STATUS


def status_of_a_child_of(parent: int) -> int:
    code = f"from tandem.parent import die_with_parent; die_with_parent({parent}); raise SystemExit(3)"
    return subprocess.run([sys.executable, "-c", code]).returncode


def test_a_parent_that_went_before_the_kernel_was_told_is_noticed() -> None:
    assert status_of_a_child_of(os.getpid()) == 3
    assert status_of_a_child_of(os.getppid()) == ORPHAN_STATUS
