"""``nsa::window_attention``, registered with PyTorch."""

from nsa.ops._range import KeyRange, register_range_attention

window_attention_op = register_range_attention("window_attention", KeyRange.of_window)
