"""Timelines: what every worker did when, predicted or measured, and what follows from it."""

from gnomon.timeline.types import NONE, ROLES, Memory, Role, Spans, Timeline, Worker

__all__ = ["NONE", "ROLES", "Memory", "Role", "Spans", "Timeline", "Worker"]
