"""``nsa plan``: what a run will need, before it runs: parameters, operations, memory, time and cost."""
