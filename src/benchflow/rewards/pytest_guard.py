"""A pytest plugin that runs inside the sandbox: it decides which other plugins are loaded.

Plugin autoloading is off, because any ``*.dist-info`` folder on the import path could name
a plugin. This one loads the entry points of installed distributions again, except those
that lie where the agent could write. Standard library only; Python 3.8 or newer.

``BENCHFLOW_UNTRUSTED``: folders, separated by ``:``, whose distributions are not loaded,
unless they lie in a site-packages folder of the task's own (hardening has already removed
what was planted there). ``BENCHFLOW_PYTEST_PLUGINS``: names the task declares.
"""

import os
from importlib import metadata


def pytest_addoption(parser, pluginmanager):
    declared = set(filter(None, os.environ.get("BENCHFLOW_PYTEST_PLUGINS", "").split(",")))
    for distribution in metadata.distributions():
        place = os.path.realpath(str(distribution.locate_file("")))
        for point in distribution.entry_points:
            if point.group != "pytest11" or pluginmanager.hasplugin(point.name):
                continue
            if _is_trusted(place) or point.name in declared:
                pluginmanager.register(point.load(), name=point.name)


def _is_trusted(place):
    if os.path.basename(place) in ("site-packages", "dist-packages"):
        return not place.startswith("/home/")
    folders = filter(None, os.environ.get("BENCHFLOW_UNTRUSTED", "").split(":"))
    return not any(f"{place}/".startswith(f"{folder.rstrip('/')}/") for folder in folders)
