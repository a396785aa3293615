"""The commands of ``tritonattn``: each a module with ``add_arguments`` and ``run``."""
