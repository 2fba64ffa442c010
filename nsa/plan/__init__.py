"""``nsa plan``: memory, time and cost of a run before it runs."""
