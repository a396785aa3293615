"""``tritonattn bench``: how fast attention runs here, beside its peers and the card's own limits.

``cases`` and ``catalogue`` say what is computed, ``inputs`` makes tensors, ``peers`` are other
libraries' attention, ``correctness`` compares results with the oracle, ``timing`` and ``gpu``
measure, ``roofline`` measures the card, ``report`` keeps the figures, ``compare``, ``tables`` and
``plots`` show them, ``session`` runs a case, ``worker`` is the process that does so, and
``command`` is the command line.

Nothing else in the package imports this one.
"""
