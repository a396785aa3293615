"""Adapters to other packages, each imported on demand; nothing else in this package needs them."""
