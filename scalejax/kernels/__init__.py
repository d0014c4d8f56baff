"""Operations on arrays: no mesh, no Flax, usable on their own.

One folder per operation: `api.py` (signature, checks, choice of implementation), `reference.py` (the definition in
plain jax.numpy) and one file per implementation.
"""
