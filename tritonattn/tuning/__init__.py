"""Kernel configurations: what they are, which are valid, and where one comes from."""
