"""Any text as the tokens of a run's model."""

from __future__ import annotations

import sys

from nsa.errors import UserError, check
from nsa.train.data import Document, TextSource, fault_of_text, folder_files, load_tokenizer
from nsa.train.run_folder import RunFolder


def read_text(function: str, folder: RunFolder, text: str) -> TextSource:
    """All tokens of a file, a folder or standard input; one document is one file.

    Args:
        function: the command that was given ``--text``.
        folder: the run, whose tokenizer counts.
        text: file or folder, ``-`` for standard input.

    Raises:
        UserError: it is no text, or has no document of two tokens.
    """
    tokenizer = load_tokenizer(folder.tokenizer)
    separator_id, hint = tokenizer.separator_id, "Its synthetic task has no text."
    check(separator_id is not None, function, "--text", "be left out for this run", text, hint)
    assert separator_id is not None
    try:
        documents = [_standard_input(function)] if text == "-" else folder_files(text).documents
    except UserError as error:
        raise UserError(function, "--text", error.rule, error.value) from None
    tokens = tokenizer.encode_documents([document.text for document in documents])
    longest = max((len(document) - 1 for document in tokens), default=0)
    check(longest > 1, function, "--text", "hold a document of at least two tokens", longest)
    return TextSource(tokens, separator_id, tokenizer.token_bytes)


def _standard_input(function: str) -> Document:
    content = sys.stdin.buffer.read()
    fault = fault_of_text(content)
    check(not fault, function, "--text", "be text", f"{fault} of standard input")
    return Document("standard input", content)
