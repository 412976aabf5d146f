"""Kernels for CPUs, in C++, of what lies between the products of matrices, and of products of few rows.

They are compiled when a process first uses one, for its own processor, and kept in the user's cache. Where
there is no C++ compiler torch's own operations do the same, several times slower; `hflow doctor` says which.
"""
