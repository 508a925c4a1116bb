"""Objects in the shared memory of a Beeline node.

>>> import beeline
>>> store = beeline.objects.connect()
>>> ref = store.put(b"hello")
>>> bytes(store.get(ref))
b'hello'
"""

from . import objects
from ._native import __version__

__all__ = ["__version__", "objects"]
