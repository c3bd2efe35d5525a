"""From a pod and a pool to a patch, or to a refusal with a reason."""
