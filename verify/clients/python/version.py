"""Succeeds when a module is here in a version: version.py MODULE VERSION."""

import importlib
import sys

try:
    module = importlib.import_module(sys.argv[1])
except ImportError:
    sys.exit(1)

version = getattr(module, "__version__", None) or getattr(module, "version", None)
sys.exit(0 if version == sys.argv[2] else 1)
