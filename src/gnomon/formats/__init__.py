"""Room `formats`: reading and writing what other programs use, one file for each.

Readers are strict: a key that changes the result and is not understood is an error that names it.
"""
