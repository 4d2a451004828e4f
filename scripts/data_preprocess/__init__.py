"""Write datasets in the form that the scripts read. The preflight imports common.py as well."""
