"""Decode cache: what later queries still need of the past, and nothing else.

Memory is reserved once, for ``max_tokens`` tokens of each sequence or for ``num_pages`` pages that
the sequences share. A page holds the tokens of one selection block: their rotated keys and values
of the selected branch, and the compressed keys and values whose last token lies in it. The last
tokens of the window, and those that the next compressed block may need, lie in a ring for each
sequence: the token at position p in row ``p % ring``. Nothing of the past is ever copied when
tokens are taken in.
"""

from nsa.cache.cache import LayerCache, NSACache

__all__ = ["LayerCache", "NSACache"]
