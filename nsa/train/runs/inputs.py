"""Trained model of a run, and texts to apply it to."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from nsa.errors import UserError, check
from nsa.lm.config import LMConfig
from nsa.lm.model import LanguageModel
from nsa.train.checkpoint import load_tensors, step_of
from nsa.train.data import Document, TextSource, fault_of_text, folder_files, load_tokenizer
from nsa.train.run_folder import RunFolder
from nsa.train.state import weights


def load_model(
    config: LMConfig,
    checkpoint: Path,
    device: torch.device,
) -> tuple[LanguageModel, int]:
    """Load the model of a checkpoint, with its fp32 weights.

    Args:
        config: configuration of the model.
        checkpoint: folder of the checkpoint.
        device: device of the model.

    Returns:
        The model in evaluation mode, and its optimizer steps.

    Raises:
        ValueError: the checkpoint is damaged or contains another model.
    """
    model = LanguageModel(config).to(device)
    load_tensors(checkpoint, weights(model))
    return model.eval(), step_of(checkpoint)


def read_text(function: str, folder: RunFolder, text: str) -> TextSource:
    """Read all tokens of a file, a folder or standard input; one document is one file.

    Args:
        function: the command, for messages.
        folder: the run, which has the tokenizer.
        text: file or folder, ``-`` for standard input.

    Raises:
        UserError: the content is not text, or has no document of two tokens.
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
    check(longest > 1, function, "--text", "contain a document of at least two tokens", longest)
    return TextSource(tokens, separator_id, tokenizer.token_bytes)


def _standard_input(function: str) -> Document:
    content = sys.stdin.buffer.read()
    fault = fault_of_text(content)
    check(not fault, function, "--text", "be text", f"{fault} of standard input")
    return Document("standard input", content)
