"""Log and text for people: nothing that others wrote can act on a terminal."""

import logging
import re
import sys

_FORMAT = "%(asctime)s %(levelname)s %(name)s: {who}%(message)s"
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that a terminal obeys, that are invisible, or that reverse text; a tab and a newline are text."""


def printable(text: str) -> str:
    """Returns a text that others wrote as it may be printed: ``printable("\\x1b[2J")`` is ``"\\\\x1b[2J"``."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def start_log(*, level: int = logging.INFO, who: str = "") -> None:
    """Sends this process's log to standard error. `who` stands before each message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable(_FORMAT.format(who=who)))
    logging.basicConfig(level=level, handlers=[handler])
