"""Every side effect: the command line, files, progress, pictures."""
