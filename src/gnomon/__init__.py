"""Gnomon tells you how a deep-learning job will run before you run it.

The public verbs will be re-exported here; today the package is its rooms.
"""

__version__ = "0.1.0.dev0"
