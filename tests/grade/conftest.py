"""Ranks that all tests of a file share."""

import pytest


@pytest.fixture(scope="module")
def workers():
    started = {}
    yield started
    for ranks in started.values():
        ranks.close()
