"""The ledger: every loss and every decision of a run on record (docs/ledger.md)."""
