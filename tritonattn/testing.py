"""Comparing this package with its oracle: the error budget, one call that applies it, and inputs to apply it to.

    >>> from tritonattn.testing import Case, check_case
    >>> case = Case("paged_attention", k_lens=(5, 17), page_size=16, options={"window_size": (3, 0)}, poison="nan")
    >>> out = check_case(case)

A failure prints the call so that it can be pasted into a Python prompt.
"""
