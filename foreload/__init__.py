"""Foreload: fast decoding of Mixture-of-Experts models whose experts live in host memory."""

from foreload.errors import ForeloadError
from foreload.settings import Settings
from foreload.shape import ModelShape

__version__ = "0.1.0"

__all__ = ["ForeloadError", "ModelShape", "Settings", "__version__"]
