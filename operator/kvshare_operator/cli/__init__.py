"""The command line: kvshare plan and, later, its neighbours."""
