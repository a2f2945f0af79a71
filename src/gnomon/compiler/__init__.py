"""The compiler: a backend of `torch.compile` for the CPU, made of tiles.

Read in this order: `sizes`, `body` and `values` (what is computed), `lowering` and `rules/` (what each
operation computes), `groups` (what is computed together), `stages` and `tiles` (in which order and where each
edge lives), `nest` (its C++), `build`, `program`, `gate`, `backend`; then `device` with `stencil/`, and `matmul_tile`
with `chains`. Importing this package imports
nothing of it.
"""
