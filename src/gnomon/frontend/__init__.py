"""Room `frontend`: a torch module as a Graph.

Needs torch.
"""
