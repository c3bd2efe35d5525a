"""What a maintainer needs to cut a release: one version, checks, artefacts. `make release-check`, `make release`."""
