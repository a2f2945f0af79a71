"""The text of kernels: a loop nest as C++ or as Triton, and how the latter is loaded and called.

Leaves out g++ and the cache of libraries (`gnomon.compiler.build`).
"""
