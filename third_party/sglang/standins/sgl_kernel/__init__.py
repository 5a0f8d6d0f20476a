"""Names of SGLang's CUDA kernels, for a server on CPU; see absent.py."""

from absent import stand_in

__version__ = "0.0.0"
__getattr__ = stand_in(__name__)
