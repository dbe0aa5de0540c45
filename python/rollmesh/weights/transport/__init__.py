"""Weights between processes of one machine, and between the ranks of a group."""
