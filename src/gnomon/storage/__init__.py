"""How a weight is stored: one frozen value a form, from the checkpoint to the kernel.

One file a family: `dense`, `integers` (int8, int4, ternary), `shifted` (int4 with offsets), `ordered` (groups in an
order of their own), `tables` (NF4, MXFP4), `float8`, `gguf` (ggml's blocks), `n_of_m`, `unstructured` (bitmaps, CSR)
and `blocks`, which are `sparse`; `form` is what all are, `names` reads a name.
Leaves out files and kernels.
"""
