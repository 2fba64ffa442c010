"""``nsa bench``: measures, tunes, reports. There is no time without a correct result beside it."""
