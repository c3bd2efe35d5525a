"""Everything that talks to the cluster; it decides nothing."""
