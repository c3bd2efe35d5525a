"""The command line of people: one file for each command, and what they read and print."""
