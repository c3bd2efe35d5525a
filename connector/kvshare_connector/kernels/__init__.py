"""Packing and unpacking of canonical objects: a plain torch reference, faster versions beside it, and their choice."""
