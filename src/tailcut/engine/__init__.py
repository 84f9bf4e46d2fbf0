"""What a group works with: how it opens, its lanes, the ops in flight on them, and their totals."""
