"""Packing and unpacking of canonical objects: a plain torch reference, and the Triton version beside it."""
