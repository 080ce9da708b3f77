"""Parts of `scripts/docs`: a module for what its tables are made from.

What needs torch is imported where it is used, so that all other tables can be made without.
"""
