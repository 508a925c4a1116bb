"""A Beeline node's objects in shared memory, its durable keys, and its direct store.

>>> import beeline
>>> store = beeline.objects.connect()
>>> ref = store.put(b"hello")
>>> bytes(store.get(ref))
b'hello'
"""

from . import direct, kv, objects
from ._native import __version__

__all__ = ["__version__", "direct", "kv", "objects"]
