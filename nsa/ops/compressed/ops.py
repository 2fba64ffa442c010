"""``nsa::compressed_attention``, registered with PyTorch."""

from nsa.ops._range import KeyRange, register_range_attention

compressed_attention_op = register_range_attention("compressed_attention", KeyRange.of_blocks)
