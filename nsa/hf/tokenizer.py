"""Conversion of tokenizers to transformers."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nsa.train.data.tokenizer import BYTE_OF, SEPARATOR


def as_transformers(saved: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Convert a tokenizer; ids and decoded texts are equal.

    Bytes that are not UTF-8 are decoded as U+FFFD. The name of the separator inside a text is
    ordinary text. The separator is the EOS and padding token; for bytes it is 0, like NUL.

    Args:
        saved: contents of a file from :meth:`nsa.train.data.Tokenizer.save`.
    """
    separator, definition = saved["separator"], saved["tokenizer"]
    if definition is None:
        backend, separator = _bytes(separator is not None), separator and SEPARATOR
    else:
        # drop the post-processor, which would add tokens around a text
        backend = Tokenizer.from_str(json.dumps({**definition, "post_processor": None}))
    tokens = {"eos_token": separator, "pad_token": separator} if separator else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        **tokens,
    )


def _bytes(has_separator: bool) -> Tokenizer:
    """Byte tokenizer: byte-level BPE without merges."""
    vocab = {character: byte for character, byte in BYTE_OF.items() if byte or not has_separator}
    unknown = None
    if has_separator:
        unknown = SEPARATOR
        vocab[SEPARATOR] = 0
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if has_separator:
        backend.add_special_tokens([AddedToken(SEPARATOR, normalized=False)])
    return backend
