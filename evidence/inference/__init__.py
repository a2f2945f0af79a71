"""Published runs of inference: read into what a person would have asked, predicted, and scored by family."""

from evidence.inference.score import is_table as is_table
from evidence.inference.table import table as table
