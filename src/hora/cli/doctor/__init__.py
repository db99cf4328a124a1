"""`hora doctor`: diagnoses this machine or a list of hosts, with advice.

Reading order: `probe` (runs on each host and reports facts), `findings` (pure: from facts to text), `examine`.
"""

from hora.cli.doctor.examine import main, make_parser

__all__ = ["main", "make_parser"]
