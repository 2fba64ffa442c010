"""The newcomers' page: its program prints what the page says, and the picture shows the same."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_program_prints_what_page_and_picture_show() -> None:
    page = (DOCS / "one-query.md").read_text(encoding="utf-8")
    (program, printed) = re.findall(
        r"^```(?:python|text)\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(program, "one-query.md", "exec"), {})
    assert out.getvalue() == printed
    (blocks,) = re.findall(r"selected blocks: (.*)", printed)
    picture = (DOCS / "images" / "one-query.svg").read_text(encoding="utf-8")
    assert re.findall(r'id="block-(\d+)"', picture) == [str(block) for block in json.loads(blocks)]
