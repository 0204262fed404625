"""What a process logs, as text."""

import logging


def listen(name: str = "fastps") -> list[str]:
    """A list of the messages that this logger, and those below it, log from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    return said
