"""Replay: a run again, with the fates and decisions of its ledger in place of those of the network."""
