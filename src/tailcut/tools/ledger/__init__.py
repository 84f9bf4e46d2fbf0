"""``tailcut ledger``: what a run cost, one op of it, where two runs part, and its tables."""
