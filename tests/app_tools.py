"""What the tests of the web page need besides the package, and what happens where it is missing.

`make test` skips what needs Gradio, Playwright or Chromium where one of them is missing. `make test-app` sets
CLUSTRS_TEST_APP=1, and a missing one fails instead.
"""

import os
import shutil
from importlib.util import find_spec

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The browser that `tools/chromium.sh` looks for."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def need(*modules: str, chromium: bool = False) -> None:
    """Skip a test, or fail it in `make test-app`, where something that it needs is missing."""
    missing = [name for name in modules if find_spec(name) is None]
    if chromium and find_chromium() is None:
        missing.append("chromium")
    if missing:
        complaint = f"needs {', '.join(missing)}: make test-app sets them up"
        if os.environ.get("CLUSTRS_TEST_APP"):
            pytest.fail(complaint, pytrace=False)
        pytest.skip(complaint)
