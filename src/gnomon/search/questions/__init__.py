"""Questions: what is asked beside the fastest plan: fronts, fewest devices, largest models, sweeps, reasons.

Each is answered by searches. Left out: printing (`report`).
"""
