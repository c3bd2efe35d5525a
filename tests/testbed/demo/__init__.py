"""The demo: two tensor-parallel sizes and two cache layouts share one cache on a Kubernetes cluster.

`run` does the steps and decides whether each is right; `place` is the cluster under it (made here, or given);
`manifests/` holds what a user would apply. The end-to-end tests drive the same steps.
"""
