"""The pagekv command."""
