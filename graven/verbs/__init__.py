"""Verbs of the command line, a file for each family; `graven.cli` puts them together."""
