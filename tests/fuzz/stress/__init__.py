"""Deterministic stress tests of the engine: random programs of collectives against a plain reference.

    program    programs, and their form as text
    generate   generates a program from a seed
    reference  computes the expected results of every operation
    judge      compares the ranks' records with them
    shrink     finds a small program that fails in the same way
    player     runs a program inside one rank

All but `player` are pure: they start no process and use no engine.
"""
