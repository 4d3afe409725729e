"""Loads tests/plugin.py, which adds options such as --stage to pytest.

This file must stay in the root folder. When pytest looks for it, it doesn't know the option --stage yet. So it takes
`mine` in `pytest --stage mine` for a path of tests, and looks for a conftest.py only in mine/ and in folders above it.
"""

pytest_plugins = ["tests.plugin"]
