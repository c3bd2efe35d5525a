"""Benchmarks: measure the product as it is shipped, next to what else could be done with the same bytes.

May import everything; nothing imports it, and no package ships it. Every benchmark proves first that the bytes are
right, and says nothing when they are not.
"""
