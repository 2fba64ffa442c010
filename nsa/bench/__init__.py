"""``nsa bench``: measures the operators, tunes their tiles, reports. No figure without a correct result in the same process."""
