"""Requests: what a person asks for, typed, for the command line and for Python alike.

`verbs` holds `gnomon.predict` and `gnomon.plan`; `arguments` looks up names and checks types. Leaves out argv, which
`cli` reads, and the answers.
"""
