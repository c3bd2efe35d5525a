"""KVShare's operator: one pool resource, one admission webhook, one reconcile loop.

``api`` holds the Kubernetes surface, ``core`` decides and touches nothing, ``edges`` talks to the cluster
and decides nothing, ``cli`` is the command line of people.
"""
