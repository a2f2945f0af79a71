"""Gnomon tells you how a deep-learning job will run before you run it."""

__version__ = "0.1.0.dev0"
