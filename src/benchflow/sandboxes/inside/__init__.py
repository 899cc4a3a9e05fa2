"""What runs inside a sandbox: the resident helper and its parts.

These files are copied beside a private copy of the host's interpreter (``runtime.py``)
and run there with nothing but built-in and a few extension modules, so they import
``posix`` rather than ``os`` and never anything of the package.
"""
