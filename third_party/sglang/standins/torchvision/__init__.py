"""Names of torchvision, which a server of text models imports and never calls; see absent.py."""

from absent import stand_in

__version__ = "0.0.0"
__getattr__ = stand_in(__name__)
