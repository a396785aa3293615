"""The Triton kernels.

Importing this package decides, before any kernel is decorated, who runs them: GPU or interpreter.
"""

from .. import device, interpreter

if device.interpreting():
    interpreter.enable()
