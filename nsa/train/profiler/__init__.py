"""``nsa profile``: time of training steps by stage, and memory by module."""
