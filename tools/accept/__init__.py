"""The acceptance run: the product as a user starts it, measured and judged, one row a case."""
