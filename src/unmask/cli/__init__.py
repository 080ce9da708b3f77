"""The command line. Nothing here imports torch before a verb needs the engine."""
