"""Loads tests/plugin.py, which has the options of the tests.

This file stays in the root folder: pytest knows no option yet when it looks for this file. So it takes `mine` in
`pytest --stage mine` for a path, and finds only a conftest.py in mine/ or above.
"""

pytest_plugins = ["tests.plugin"]
