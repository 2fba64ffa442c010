"""``nsa::window_attention``, registered with PyTorch: schema, fake, autograd."""

from nsa.ops._range import register_range_attention

window_attention_op = register_range_attention("window_attention", window=True)
