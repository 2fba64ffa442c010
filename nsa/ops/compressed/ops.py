"""``nsa::compressed_attention``, registered with PyTorch: schema, fake, autograd."""

from nsa.ops._range import register_range_attention

compressed_attention_op = register_range_attention("compressed_attention", window=False)
