"""Succeeds when Python's own tests are here; says its version, as in package names."""

import sys

print("%d.%d" % sys.version_info[:2])

import test.test_socket  # noqa: E402, F401
