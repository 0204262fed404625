"""Show the examples of docstrings as code (an extension of Griffe): Markdown would take `>>>` for a quotation."""

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(Extension):
    """Fence each example of each docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of an object that Griffe has just read."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda match: f"\n```pycon\n{match[0]}\n```\n", obj.docstring.value)
