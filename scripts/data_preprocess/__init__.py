"""Write datasets in the form that the scripts read."""
