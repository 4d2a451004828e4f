"""Modules that the programs import or call. There is nothing to run by hand."""
