"""Whether the packages named as NAME==VERSION are installed in these versions."""

import importlib.metadata
import sys

for wanted in sys.argv[1:]:
    name, version = wanted.split("==")
    if importlib.metadata.version(name) != version:
        sys.exit(1)
