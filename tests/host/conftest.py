"""Commands that are run in the tests' process keep nothing in the user's cache directory."""

import pytest

from purejaxppo.host import cache


@pytest.fixture(scope="session", autouse=True)
def no_cache():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "use", lambda: None)
        yield
