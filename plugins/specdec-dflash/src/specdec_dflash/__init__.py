"""Block drafters over tapped hidden layers: DFlash, DFlash 2, DSpark, DeepSpec."""

__all__ = ["__version__"]

__version__ = "0.1.0"
