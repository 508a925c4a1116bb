"""Succeeds when redis-py is here in the version given as the only argument."""

import sys

try:
    import redis
except ImportError:
    sys.exit(1)

sys.exit(0 if redis.__version__ == sys.argv[1] else 1)
