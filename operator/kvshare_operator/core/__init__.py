"""Decisions as pure functions: no cluster, no clock, no network, no framework."""
