"""See a job run: the live page, `hora top`, recorded runs, `/metrics`.

Reads what ranks report; nothing below imports it.
"""
