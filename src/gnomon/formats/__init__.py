"""Room `formats`: reading and writing what other programs use, one folder a program, its reader beside its writer.

A folder's `FORMAT` (a `format.Format`) states how its files are recognised, read and written; the folders are the
registry (`programs`), so that a new program is one folder and no list. The files beside them are what formats share.

Readers are strict: a key that changes the result and is not understood is an error that names it.
"""
