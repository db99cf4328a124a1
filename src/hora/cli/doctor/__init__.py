"""`hora doctor`: what is wrong with this machine or these hosts, and what to do about it.

Reading order: `probe` (runs on each host and reports facts), `findings` (pure: facts to words), `examine`.
"""

from hora.cli.doctor.examine import main, make_parser

__all__ = ["main", "make_parser"]
