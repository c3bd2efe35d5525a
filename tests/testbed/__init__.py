"""The test bed: everything around the product that its demo and its tests need, on one plain machine.

Preparation (`testbed.prepare`), the one-node cluster (`testbed.cluster`), Mooncake and vLLM processes, a tiny
model and a reference attention backend. The product never imports this package. `testbed.prepare` and the
modules that it uses run on the standard library only, because they run before anything is installed.
"""
