"""The attention kernel's twin for compute capability 9.0, in Gluon.

It uses what Triton's own language has no words for: copies by the tensor memory accelerator,
warpgroups with roles of their own, and products that run while their results are awaited.
"""
