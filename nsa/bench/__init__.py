"""``nsa bench``: measures, tunes, reports. Only a correct result gets a time."""
