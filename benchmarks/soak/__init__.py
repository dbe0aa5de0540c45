"""Tests that memory does not grow over ten thousand syncs and generators and a million requests;
__main__.py has the command."""
