"""Programs that write datasets. The preflight imports what they share in common.py."""
