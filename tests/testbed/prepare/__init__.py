"""Preparation of a machine: Debian packages, Python environment, Go programs, images.

Standard library only: it runs on a machine where nothing else is installed. One file per subject; `plan` puts
the steps in order, `runner` runs them.
"""
