"""Decode cache: the keys and values that later queries need.

Memory is reserved once, for ``max_tokens`` tokens of each sequence or for ``num_pages`` pages that
the sequences share. A page stores the tokens of one selection block: rotated keys and values of the
selected branch, index keys, and the compressed keys and values whose last token is in the block.
Each sequence
has ring buffers for the window and for the tokens of the next compressed block: the token at
position p is in row ``p % ring``. Appending tokens never copies cached ones.
"""

from nsa.cache.cache import LayerCache, NSACache

__all__ = ["LayerCache", "NSACache"]
