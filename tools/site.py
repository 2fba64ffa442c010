"""Hook of mkdocs: references in docstrings, such as ``:func:`nsa.combine```, become code."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Remove the role in front of a name."""
    return re.sub(r":(?:func|class|meth|mod|attr):(?=<code>)", "", html)
