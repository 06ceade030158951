"""The garbage collector, off while a program imports what it needs.

Imports of vLLM and torch make hundreds of thousands of objects that stay; looking through them again and again takes a
quarter of the time.
"""

import gc


def begin() -> None:
    """To be called before the heavy imports."""
    gc.disable()


def keep() -> None:
    """To be called when most is there, before code that calls the collector by itself, as vLLM's engine does five times
    while it loads a model: it never looks at what is there now."""
    gc.freeze()


def done() -> None:
    """To be called when all is loaded: the collector works again, and never looks at what is there now."""
    gc.freeze()
    gc.enable()
