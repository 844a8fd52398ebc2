"""Tests of single files, in one process and without communication."""
