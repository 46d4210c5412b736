"""What tests of grammars share."""

from collections.abc import Iterator

import pytest

from tandem.sampling import grammar


@pytest.fixture(scope="module")
def nothing_is_left() -> Iterator[None]:
    """The processes of grammars live as long as the module's tests and no longer."""
    grammar.hold()
    yield
    grammar.release()
    assert not grammar.processes() or grammar._users
