"""A deterministic stress of the engine: random programs of collectives against a plain reference.

    program    what a program is, and its form as text
    generate   a program from a seed
    reference  what every operation must give
    judge      what the ranks saw, against that
    shrink     a small program that fails the same way
    player     plays a program, inside one rank

All but `player` are pure: they start no process and use no engine.
"""
