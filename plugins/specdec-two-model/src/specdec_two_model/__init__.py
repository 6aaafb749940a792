"""Draft models: any smaller mlx-lm model of the same tokenizer drafts for a larger one."""

__all__ = ["__version__"]

__version__ = "0.1.0"
